# SPDX-License-Identifier: Apache-2.0
"""`curve.jsonl` beside the heads: training loss and held-out figures by step, written during the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.quote import place

NAME = "curve.jsonl"
LONGEST = 1 << 24  # bytes of the longest file that is read
POINTS = 500  # most training losses per run


class Point(BaseModel):
    """One line: the mean training loss since the last such line, or held-out figures, or both."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    step: int = Field(ge=0, description="optimiser steps so far")
    tokens: int = Field(ge=0, description="tokens read by these steps")
    loss: float | None = None
    rate: float | None = None  # factor on the peak learning rates
    held_out_loss: float | None = None
    held_out: dict[str, Any] | None = None  # figures by name, as in provenance.json

    def line(self) -> str:
        return self.model_dump_json(exclude_none=True) + "\n"


def begin_curve(folder: Path, step: int) -> None:
    """Begin the file of a run, or drop the lines from after the checkpoint that it continues from."""
    points = read_curve(folder) if step else []
    write_text(folder / NAME, "".join(point.line() for point in points if point.step <= step))


def add_point(folder: Path, point: Point) -> None:
    with (folder / NAME).open("a", encoding="utf-8") as file:
        file.write(point.line())


def read_curve(folder: Path) -> list[Point]:
    """The points of a heads folder's curve, in order; empty if it has no curve.

    Raises:
        TrainingError: if a line is damaged, except for a last line that a kill cut off.
    """
    path = folder / NAME
    if not path.is_file():
        return []
    if path.stat().st_size > LONGEST:
        raise TrainingError(f"{place(path)} has over {LONGEST:,} bytes, more than any run writes; delete it")
    complete, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    points = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            points.append(Point.model_validate_json(line))
        except ValidationError:
            raise TrainingError(f"{place(path, number)} is damaged; delete the line or the file") from None
    return points
