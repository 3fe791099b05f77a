# SPDX-License-Identifier: Apache-2.0
"""Seconds of a decoder layer and of the LM head by rows: from a calibration, from a server, or from a roofline."""

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import safe_open

from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.measured import Timed, Timing
from vllm_ppd.heads.planning.options import PlanOptions
from vllm_ppd.heads.planning.timings import ServedSteps, line, served_steps, steps_of

# Bytes per number of safetensors' types.
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}


class Machine(NamedTuple):
    """The times that a prediction needs; rows are tokens computed together."""

    layer: Callable[[float], float]  # rows to seconds of one decoder layer
    lm_head: Callable[[float], float]  # rows to seconds of one read of the whole LM head
    link: float = 0.0  # seconds of one message between pipeline stages
    served: ServedSteps | None = None  # whole steps measured by a server, used instead of layers and LM head


def machine_of(options: PlanOptions, timing: Timing, target: str, num_layers: int) -> Machine:
    """The machine that the options ask for: a roofline, a server's steps, or the calibration's times."""
    if options.hardware is not None:
        bandwidth, peak, link = options.hardware
        return roofline(weights_of(target), 1e9 * bandwidth, 1e12 * peak, 1e-6 * link)
    if options.timings is not None:
        served = served_steps(options.timings, target)
        if served is not None:
            return measured(timing.seconds)._replace(served=served)
        step, share = line(steps_of(options.timings, target)), timing.lm_head_share
        return Machine(lambda rows: (1 - share) * step(rows) / num_layers, lambda rows: share * step(rows))
    return measured(timing.seconds)


def measured(seconds: Timed) -> Machine:
    """The calibration's times, interpolated and extrapolated linearly in the number of rows."""
    return Machine(line(seconds.layer), line(seconds.lm_head))


class Weights(NamedTuple):
    """Weights of a dense target: numbers and bytes of one decoder layer (mean) and of the LM head."""

    layer: tuple[float, float]
    lm_head: tuple[float, float]


def roofline(weights: Weights, bandwidth: float, peak: float, link: float) -> Machine:
    """max(bytes / bandwidth, FLOP / peak): weights are read once, 2 FLOP per weight and row; KV reads are left out.

    Args:
        weights: of the target.
        bandwidth: bytes per second.
        peak: FLOP per second.
        link: seconds of one message between pipeline stages.
    """

    def seconds(numbers: float, size: float) -> Callable[[float], float]:
        return lambda rows: max(size / bandwidth, 2 * numbers * rows / peak)

    return Machine(seconds(*weights.layer), seconds(*weights.lm_head), link)


def weights_of(folder: str) -> Weights:
    """Count the weights of a target on this disk.

    Raises:
        HeadsError: if it is not on this disk, or is a mixture of experts.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise HeadsError(f"target {folder!r} has no safetensors files on this disk; give --model DIR")
    layers: set[str] = set()
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for file in files:
        with safe_open(str(file), "np") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                tensor = opened.get_slice(name)
                numbers = math.prod(tensor.get_shape())
                size = np.array([numbers, numbers * BYTES.get(tensor.get_dtype(), 2)], dtype=float)
                if ".experts." in name:
                    raise HeadsError(f"target {folder!r} is a mixture of experts, which is not supported here")
                before, _, after = name.partition("layers.")
                if after:
                    layers.add(before + after.split(".")[0])
                    sums["layers"] += size
                elif name.startswith(("lm_head.", "embed_out.")):
                    sums["lm_head"] += size
                elif "embed_tokens" in name or "embed_in" in name:
                    sums["embedding"] += size
    if not layers:
        raise HeadsError(f"target {folder!r} has no decoder layers named layers.N")
    layer, lm_head = sums["layers"] / len(layers), sums["lm_head" if "lm_head" in sums else "embedding"]
    return Weights((float(layer[0]), float(layer[1])), (float(lm_head[0]), float(lm_head[1])))
