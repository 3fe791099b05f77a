# SPDX-License-Identifier: Apache-2.0
"""`ppd bench curves`: the curves of training as the papers draw them, and how flat they are at their end."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks.results.options import CurvesOptions
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.in_words import table
from vllm_ppd.heads.io import load_config
from vllm_ppd.heads.training.curve import NAME, Point, read_curve

TRAINING = "training loss"
# No losses, or another unit of one that is drawn.
NOT_DRAWN = {"share_of_experts", "joint_nats_a_token", "first_position", "tokens_in_vocabulary"}
LAST = 0.25  # of a run's steps: the part whose fall tells how flat the end is
ACROSS = 2  # panels beside each other


class Series(NamedTuple):
    """A curve."""

    panel: str  # what is measured
    label: str
    tokens: list[int]
    values: list[float]


def run(options: CurvesOptions) -> str:
    """Draw the curves and tell how far they fell, in all and at their end.

    Raises:
        TrainingError: if matplotlib is missing, or a folder has no curve.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise TrainingError("ppd bench curves draws with matplotlib: pip install 'vllm-ppd[bench]'")
    from vllm_ppd.benchmarks.results.drawing import svg

    curves: list[Series] = []
    kinds = {load_config(folder).kind for folder in options.heads}
    if len(kinds) > 1:
        raise TrainingError(f"--heads are of kinds {', '.join(sorted(kinds))}: draw each kind by itself")
    for folder in options.heads:
        points = read_curve(Path(folder))
        if not points:
            raise TrainingError(f"heads in {folder!r} have no {NAME}: train them again, or leave them out")
        curves += series(points, Path(folder).name if len(options.heads) > 1 else "")
    write_text(Path(options.out), svg(lambda: _figure(curves)))
    return table(["curve", "first", "last", f"fell in the last {LAST:.0%} of the tokens"], list(map(row_of, curves)))


def series(points: Sequence[Point], name: str) -> Iterator[Series]:
    """All curves of a run: the training loss, and each held-out figure."""
    losses = [point for point in points if point.loss is not None]
    yield Series(TRAINING, name, [p.tokens for p in losses], [p.loss for p in losses if p.loss is not None])
    by_name: dict[tuple[str, str], Series] = {}
    for point in points:
        for panel, label, value in _figures(point.held_out or {}):
            label = " ".join(filter(None, (name, label)))
            curve = by_name.setdefault((panel, label), Series(f"held out: {panel}", label, [], []))
            curve.tokens.append(point.tokens)
            curve.values.append(value)
    yield from by_name.values()


def _figures(held_out: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(what is measured, of what, value) of the figures of an evaluation."""
    for name, value in held_out.items():
        if name in NOT_DRAWN:
            continue
        if isinstance(value, dict):  # early heads: by exit
            yield from ((measure, name, float(number)) for measure, number in value.items())
        elif isinstance(value, list):  # CP heads: by position
            first = int(held_out.get("first_position", 1))  # 2 where the head has a condition
            yield from ((name, f"position {i}", float(number)) for i, number in enumerate(value, start=first))
        elif name.startswith("head "):  # DynaMo: by token head
            head, measure = name.rsplit(" ", 1)
            yield measure, head, float(value)
        else:
            yield name, "", float(value)


def row_of(curve: Series) -> list[str]:
    """A curve's name, its first and last value, and how far it fell in the last part of the tokens."""
    begin = next(i for i, tokens in enumerate(curve.tokens) if tokens >= (1 - LAST) * curve.tokens[-1])
    fell = curve.values[begin] - curve.values[-1]
    share = f" ({fell / abs(curve.values[begin]):.1%})" if curve.values[begin] else ""
    name = ", ".join(filter(None, (curve.panel, curve.label)))
    return [name, f"{curve.values[0]:.4f}", f"{curve.values[-1]:.4f}", f"{fell:.4f}{share}"]


def _figure(curves: Sequence[Series]) -> Any:
    import matplotlib.pyplot as plt

    from vllm_ppd.benchmarks.results.drawing import WIDTH

    panels = list(dict.fromkeys(curve.panel for curve in curves))
    down = -(-len(panels) // ACROSS)
    figure, axes = plt.subplots(down, ACROSS, figsize=(WIDTH, 2.7 * down), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        for curve in (curve for curve in curves if curve.panel == panel):
            marker = {} if panel == TRAINING else {"marker": "o", "markersize": 3}
            axis.plot(curve.tokens, curve.values, linewidth=1.2, label=curve.label or None, **marker)
        axis.set_title(panel.replace("_", " "), fontsize=9)
        axis.set_xlabel("tokens")
        if any(curve.label for curve in curves if curve.panel == panel):
            axis.legend(fontsize=7)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    return figure
