# SPDX-License-Identifier: Apache-2.0
"""`curve.jsonl` beside the heads: the loss of training and the held-out figures, by step, written as the run goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.io import write_text
from vllm_ppd.heads.quote import place

NAME = "curve.jsonl"
LONGEST = 1 << 24  # bytes that are read
POINTS = 500  # most training losses of a run


class Point(BaseModel):
    """One line: the mean training loss since the last such line, or held-out figures, or both."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    step: int = Field(ge=0, description="optimiser steps that were done")
    tokens: int = Field(ge=0, description="tokens that these steps read")
    loss: float | None = None
    rate: float | None = None  # share of the peak learning rates
    held_out_loss: float | None = None
    held_out: dict[str, Any] | None = None  # figures by name, as in provenance.json


class Curve:
    """The file of a run; lines from after the checkpoint that a run continues from are dropped.

    Args:
        folder: of the heads.
        step: that the run begins with.
        write: whether this process writes.
    """

    def __init__(self, folder: Path, step: int, write: bool) -> None:
        self.path, self.write = folder / NAME, write
        if write:
            kept = [point for point in (read_curve(folder) if step else []) if point.step <= step]
            write_text(self.path, "".join(map(_line, kept)))

    def add(self, point: Point) -> None:
        if self.write:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(point))


def read_curve(folder: Path) -> list[Point]:
    """The points of a heads folder's curve, in order; none where it has no curve.

    Raises:
        TrainingError: if a line is damaged; a last line that a kill cut off is left out.
    """
    path = folder / NAME
    if not path.is_file():
        return []
    if path.stat().st_size > LONGEST:
        raise TrainingError(f"{place(path)} has over {LONGEST:,} bytes, more than any run writes; delete it")
    whole, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    points = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            points.append(Point.model_validate_json(line))
        except ValidationError:
            raise TrainingError(f"{place(path, number)} is damaged; delete the file, or the line") from None
    return points


def _line(point: Point) -> str:
    return json.dumps(point.model_dump(exclude_none=True)) + "\n"
