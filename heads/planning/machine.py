# SPDX-License-Identifier: Apache-2.0
"""Seconds of a decoder layer and of a read of the LM head by rows: as measured, as served, or by a roofline."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.measured import Timed, Timing
from vllm_ppd.heads.planning.options import PlanOptions

# Of safetensors' types.
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}


class Machine(Protocol):
    """What a prediction needs to know; rows are tokens computed together."""

    link: float  # seconds of one message between pipeline stages

    def layer(self, rows: float) -> float:
        """Seconds of one decoder layer."""

    def lm_head(self, rows: float) -> float:
        """Seconds of one read of the whole LM head."""


class Measured:
    """The calibration's own times, on a straight line between and beyond the rows that were timed."""

    def __init__(self, seconds: Timed, link: float = 0.0) -> None:
        self.link = link
        self._layer, self._lm_head = _ascending(seconds.layer), _ascending(seconds.lm_head)

    def layer(self, rows: float) -> float:
        return _on_line(*self._layer, rows)

    def lm_head(self, rows: float) -> float:
        return _on_line(*self._lm_head, rows)


class Served:
    """A server's own steps without drafting, shared out among its layers and the LM head.

    Args:
        steps: seconds of a decode step by requests in it.
        num_layers: of the target.
        head_share: h, what a read of the LM head is of a full pass.
        link: seconds of one message between pipeline stages.
    """

    def __init__(self, steps: dict[int, float], num_layers: int, head_share: float, link: float = 0.0) -> None:
        self.num_layers, self.head_share, self.link = num_layers, head_share, link
        self._steps = _ascending(steps)

    def layer(self, rows: float) -> float:
        return (1 - self.head_share) * _on_line(*self._steps, rows) / self.num_layers

    def lm_head(self, rows: float) -> float:
        return self.head_share * _on_line(*self._steps, rows)


def steps_of(file: str, target: str) -> dict[int, float]:
    """Median seconds of vLLM's own decode step by batch size, of the target's newest run of `ppd bench decode`.

    Raises:
        HeadsError: if the file holds none.
    """
    try:
        runs = [run for run in json.loads(Path(file).read_text())["runs"] if run["options"]["model"] == target]
        alone = [(run["options"], [turn for turn in run["turns"] if turn["contender"] == "vLLM"]) for run in runs]
        alone = [(options | {"temperature": 0}, turns) for options, turns in alone if turns]
        seconds: dict[int, list[float]] = defaultdict(list)
        for options, turns in alone:
            for turn in turns if options == alone[-1][0] else []:
                seconds[int(turn["batch"])].append(turn["window_seconds"] / turn["steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HeadsError(f"{file!r} holds no results of `ppd bench decode` ({error!r}); give its --out") from None
    if not seconds:
        raise HeadsError(f"{file!r} has no turns of {target}; run `ppd bench decode --model {target}` with that --out")
    return {size: statistics.median(values) for size, values in seconds.items()}


class Weights(NamedTuple):
    """Weights of a dense target: numbers and bytes of one decoder layer (mean) and of the LM head."""

    layer: tuple[float, float]
    lm_head: tuple[float, float]


class Roofline:
    """max(bytes / bandwidth, FLOP / peak): weights are read once, 2 FLOP a weight and row; KV reads are left out.

    Args:
        weights: of the target.
        bandwidth: bytes a second.
        peak: FLOP a second.
        link: seconds of one message between pipeline stages.
    """

    def __init__(self, weights: Weights, bandwidth: float, peak: float, link: float) -> None:
        self.weights, self.bandwidth, self.peak, self.link = weights, bandwidth, peak, link

    def layer(self, rows: float) -> float:
        return self._seconds(*self.weights.layer, rows)

    def lm_head(self, rows: float) -> float:
        return self._seconds(*self.weights.lm_head, rows)

    def _seconds(self, numbers: float, size: float, rows: float) -> float:
        return max(size / self.bandwidth, 2 * numbers * rows / self.peak)


def weights_of(folder: str) -> Weights:
    """Count the weights of a target that is on this disk.

    Raises:
        HeadsError: if it is not, or is a mixture of experts.
    """
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise HeadsError(f"target {folder!r} has no safetensors on this disk, to count its weights; give --model DIR")
    layers: dict[str, list[np.ndarray]] = {}
    head = embedding = np.zeros(2)
    for file in files:
        with safe_open(str(file), "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                part = opened.get_slice(name)
                numbers = math.prod(part.get_shape())
                size = np.array([numbers, numbers * BYTES.get(part.get_dtype(), 2)], dtype=float)
                if ".experts." in name:
                    raise HeadsError(f"target {folder!r} is a mixture of experts, which a roofline does not know")
                before, _, after = name.partition("layers.")
                if after:
                    key = before + after.split(".")[0]
                    layers.setdefault(key, []).append(size)
                elif name.startswith(("lm_head.", "embed_out.")):
                    head = size
                elif "embed_tokens" in name or "embed_in" in name:
                    embedding = size
    if not layers:
        raise HeadsError(f"target {folder!r} has no decoder layers by the name of layers.N")
    mean = np.sum([part for parts in layers.values() for part in parts], axis=0) / len(layers)
    head = head if head.any() else embedding
    return Weights((float(mean[0]), float(mean[1])), (float(head[0]), float(head[1])))


def _ascending(seconds: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """(rows, seconds) of what was timed; fewer rows never take more time: where they seem to, that is noise."""
    pairs = sorted(seconds.items())
    rows, values = np.array(pairs, dtype=float).T
    return rows, np.minimum.accumulate(values[::-1])[::-1]


def _on_line(rows: np.ndarray, seconds: np.ndarray, wanted: float) -> float:
    if wanted <= rows[-1]:
        return float(np.interp(wanted, rows, seconds))
    if len(rows) == 1:
        return float(seconds[0] * wanted / rows[0])
    slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
    return float(seconds[-1] + slope * (wanted - rows[-1]))


def machine_of(options: PlanOptions, timing: Timing, target: str, num_layers: int) -> Machine:
    """The machine of the options: a roofline, a server's own steps, or the calibration's times."""
    if options.hardware is not None:
        bandwidth, peak, link = options.hardware
        return Roofline(weights_of(target), 1e9 * bandwidth, 1e12 * peak, 1e-6 * link)
    if options.timings is not None:
        return Served(steps_of(options.timings, target), num_layers, timing.lm_head_share)
    return Measured(timing.seconds)
