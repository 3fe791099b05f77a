# SPDX-License-Identifier: Apache-2.0
"""Seconds a token and compute of each way of decoding, by batch size: section by section what a step runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from vllm_ppd.heads.measured import Setting
from vllm_ppd.heads.planning.machine import Machine


@dataclass(frozen=True)
class Decoding(ABC):
    """A way of decoding on a machine; a request gets `length` tokens a step."""

    method: str
    options: dict[str, Any]  # as a server takes them
    length: float
    compute: float  # of a token, in units of vLLM's own

    @abstractmethod
    def seconds(self, batch: int) -> float:
        """Of a step."""

    @abstractmethod
    def plain(self, batch: int) -> float:
        """Seconds of vLLM's own step on as many pipeline stages."""

    def speedup(self, batch: int) -> float:
        """Tokens a second in units of vLLM's own."""
        return self.length * self.plain(batch) / self.seconds(batch)

    def tokens_a_second(self, batch: int) -> float:
        return batch * self.length / self.seconds(batch)


def full_pass(machine: Machine, num_layers: int, rows: float) -> float:
    """Seconds of all layers and the LM head over some rows."""
    return num_layers * machine.layer(rows) + machine.lm_head(rows)


@dataclass(frozen=True)
class Drafting(Decoding):
    """Drafts of a setting, verified by the target."""

    setting: Setting
    machine: Machine
    num_layers: int

    @classmethod
    def of(cls, setting: Setting, method: str, options: dict[str, Any], machine: Machine, num_layers: int) -> Drafting:
        """A setting on a machine; its compute counts verified tokens, further layers and reads of the LM head."""
        head = machine.lm_head(1) / full_pass(machine, num_layers, 1)
        further = 0.0 if setting.exit_layer is not None else setting.layers * (1 - head) / num_layers
        work = (1 + setting.drafted) * (1 + further) + setting.reads * setting.rows * head
        return cls(method, options, setting.length, work / setting.length, setting, machine, num_layers)

    def plain(self, batch: int) -> float:
        return full_pass(self.machine, self.num_layers, batch)

    def seconds(self, batch: int) -> float:
        """A step over the drafts and the token before them; every early draft runs by itself, and no layer twice."""
        setting, machine = self.setting, self.machine
        verified = batch * (1 + setting.drafted)
        reading = setting.reads * machine.lm_head(batch * setting.rows)
        if setting.exit_layer is None:
            layers = self.num_layers + setting.layers
            return layers * machine.layer(verified) + machine.lm_head(verified) + reading
        shallow = (setting.exit_layer + setting.layers) * machine.layer(batch)
        deep = (self.num_layers - setting.exit_layer) * machine.layer(verified)
        return shallow + deep + machine.lm_head(verified) + reading


@dataclass(frozen=True)
class Group(Decoding):
    """PPD's worker group over two pipeline stages, split at layer d_bar, with k candidates (PPD, Theorem 4.1)."""

    started: float  # share of tokens whose first layers were done early: p_correct, but for the first token of a text
    split: int
    candidates: int
    machine: Machine
    num_layers: int

    @classmethod
    def of(
        cls, match_rate: float, split: int, candidates: int, options: dict[str, Any], machine: Machine,
        num_layers: int, tokens: int,
    ) -> Group:  # fmt: skip
        """A worker group on texts of l tokens; its compute is Theorem 4.1's: 1 + (k - p (l - 1) / l)(d - d_bar) / d."""
        started = match_rate * (tokens - 1) / tokens
        compute = 1 + (candidates - started) * (num_layers - split) / num_layers
        return cls("ppd", options, 1.0, compute, started, split, candidates, machine, num_layers)

    def plain(self, batch: int) -> float:
        """vLLM's stages work on two halves of a batch in turns, so that each request gets a token a pass of half."""
        return full_pass(self.machine, self.num_layers, max(1, batch / 2)) + 2 * self.machine.link

    def seconds(self, batch: int) -> float:
        """Expected seconds of a token: d - (d - d_bar) p (l - 1) / l layers; candidates run beside the last stage."""
        layer, late = self.machine.layer, self.num_layers - self.split
        candidates = late * layer(batch * self.candidates) + self.machine.lm_head(batch)
        last_stage = late * layer(batch) + self.machine.lm_head(batch)
        rest = (self.split - late) * layer(batch)
        missed = (1 - self.started) * late * layer(batch)
        return max(candidates, last_stage) + rest + missed + 2 * self.machine.link
