# SPDX-License-Identifier: Apache-2.0
"""Predicted seconds and compute per token of decoding with drafts, by batch size, from the parts of a step."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.measured import Parts, Setting
from vllm_ppd.heads.planning.machine import Machine


@dataclass(frozen=True)
class Decoding(ABC):
    """Decoding by a method on a machine; a request gets `length` tokens per step."""

    method: str
    options: dict[str, Any]  # as given to a server
    machine: Machine
    num_layers: int

    @property
    @abstractmethod
    def length(self) -> float:
        """Tokens a step."""

    @property
    @abstractmethod
    def compute(self) -> float:
        """Compute per token, relative to vLLM's."""

    @abstractmethod
    def seconds(self, batch: int) -> float:
        """Seconds of a step."""

    @abstractmethod
    def plain(self, batch: int) -> float:
        """Seconds of vLLM's step on as many pipeline stages."""

    @property
    def unmeasured(self) -> str:
        """The part of the setting that a server's measured steps lack; empty if none."""
        return ""

    def speedup(self, batch: int) -> float:
        """Tokens per second, relative to vLLM's."""
        return self.length * self.plain(batch) / self.seconds(batch)

    def tokens_a_second(self, batch: int) -> float:
        return batch * self.length / self.seconds(batch)

    def full_pass(self, rows: float) -> float:
        """Seconds of all layers and the LM head over some rows."""
        return self.num_layers * self.machine.layer(rows) + self.machine.lm_head(rows)


@dataclass(frozen=True)
class Drafting(Decoding):
    """Drafts of a setting, verified by the target."""

    setting: Setting

    @property
    def length(self) -> float:
        return self.setting.length

    @property
    def compute(self) -> float:
        """Verified tokens, further layers and reads of the LM head, over the tokens of a step."""
        setting, lm_head = self.setting, self.machine.lm_head(1) / self.full_pass(1)
        further = 0.0 if setting.exit_layer is not None else setting.layers * (1 - lm_head) / self.num_layers
        return ((1 + setting.drafted) * (1 + further) + setting.reads * setting.rows * lm_head) / setting.length

    @property
    def unmeasured(self) -> str:
        served = self.machine.served
        return "" if served is None else served.engine.missing(self.method, self.options, self.setting.drafts)

    def plain(self, batch: int) -> float:
        return self.full_pass(batch) if self.machine.served is None else self.machine.served.step(batch)

    def seconds(self, batch: int) -> float:
        """Seconds of a step over the drafts and the token before them; each early draft is a pass of its own."""
        setting, machine = self.setting, self.machine
        if machine.served is not None:
            return machine.served.step(batch, setting)
        verified = batch * (1 + setting.drafted)
        reading = machine.lm_head(verified) + setting.reads * machine.lm_head(batch * setting.rows)
        if setting.exit_layer is None:
            return (self.num_layers + setting.layers) * machine.layer(verified) + reading
        shallow = (setting.exit_layer + setting.layers) * machine.layer(batch)
        return shallow + (self.num_layers - setting.exit_layer) * machine.layer(verified) + reading


def drafting_settings(
    name: str | None, config: HeadsConfig, parts: Parts, machine: Machine, greedy: bool
) -> Iterator[Drafting]:
    """Drafting with every calibrated setting that a server has options for.

    Args:
        name: of the heads, by which a server is given them.
        config, parts: of the heads and their calibration.
        machine: that is predicted for.
        greedy: whether acceptance is that of greedy texts.
    """
    for setting in config.settings(parts, greedy):
        if setting.served is not None:
            options = {**({"model": name} if setting.trained else {}), **setting.served}
            yield Drafting(config.method, options, machine, config.target.num_hidden_layers, setting)


@dataclass(frozen=True)
class Group(Decoding):
    """PPD's worker group over two pipeline stages, split at layer d_bar, with k candidates (PPD, Theorem 4.1)."""

    split: int  # d_bar
    candidates: int  # k
    match_rate: float  # p, share of tokens among the k likeliest at the split
    tokens: int  # l, tokens of a text

    @property
    def length(self) -> float:
        return 1.0

    @property
    def started(self) -> float:
        """Share of tokens whose first layers ran early: p, except for the first token of a text."""
        return self.match_rate * (self.tokens - 1) / self.tokens

    @property
    def compute(self) -> float:
        """1 + (k - p (l - 1) / l)(d - d_bar) / d (Theorem 4.1)."""
        return 1 + (self.candidates - self.started) * (self.num_layers - self.split) / self.num_layers

    def plain(self, batch: int) -> float:
        """vLLM's stages work on two halves of a batch in turns, so that each request gets a token per pass of half."""
        return self.full_pass(max(1, batch / 2)) + 2 * self.machine.link

    def seconds(self, batch: int) -> float:
        """Expected seconds of a token: d - (d - d_bar) p (l - 1) / l layers; candidates run beside the last stage."""
        layer, late = self.machine.layer, self.num_layers - self.split
        # The candidates' layers are slower than the last stage's, which has as many layers but fewer rows.
        last_stage = late * layer(batch * max(1, self.candidates)) + self.machine.lm_head(batch)
        return last_stage + (self.split - self.started * late) * layer(batch) + 2 * self.machine.link
