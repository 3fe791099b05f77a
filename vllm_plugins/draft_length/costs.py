# SPDX-License-Identifier: Apache-2.0
"""Step costs: seconds of a decode step by batch size and drafts per request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field, model_validator
from typing_extensions import Self

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CostTable(BaseModel):
    """Seconds at the batch sizes and numbers of drafts that were measured."""

    sizes: list[int] = Field(min_length=1)  # requests, ascending
    counts: list[int] = Field(min_length=1)  # drafts per request, ascending from 0
    seconds: list[list[Seconds]]  # [sizes, counts]

    @model_validator(mode="after")
    def _rectangular(self) -> Self:
        if [len(row) for row in self.seconds] != [len(self.counts)] * len(self.sizes):
            raise ValueError(f"seconds must be {len(self.sizes)} x {len(self.counts)} numbers")
        return self


class MeasuredCosts(BaseModel):
    """Steps with the method's drafts and, where these are used, with looked-up ones."""

    method: CostTable
    lookup: CostTable | None = None

    def save(self, path: Path) -> None:
        """Write a file, as a whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(self.model_dump_json())
        part.replace(path)


class StepCosts:
    """Relative costs of steps, interpolated linearly in batch size and drafts.

    A step with fewer requests or drafts takes no longer than one with more: where it seemed to, something else ran on
    the machine. Beyond the largest measured batch, seconds go on as between the two largest.
    """

    def __init__(self, table: CostTable) -> None:
        self.most = table.counts[-1]
        self._sizes, drafts = np.array(table.sizes, dtype=float), np.arange(1 + self.most)
        measured = np.array(table.seconds)[::-1, ::-1]
        ascending = np.minimum.accumulate(np.minimum.accumulate(measured, axis=0), axis=1)[::-1, ::-1]
        self._seconds = np.array([np.interp(drafts, table.counts, row) for row in ascending])  # [sizes, 1 + N]
        self._relative: dict[int, np.ndarray] = {}

    def relative(self, requests: int) -> np.ndarray:
        """Costs of steps with 0, 1, ... drafts in units of a step without drafts: [1 + N], none below 1."""
        if requests not in self._relative:
            seconds = self._at(requests)
            self._relative[requests] = np.maximum(seconds / seconds[0], 1.0)
        return self._relative[requests]

    def _at(self, requests: int) -> np.ndarray:
        sizes, seconds = self._sizes, self._seconds
        if len(sizes) > 1 and requests > sizes[-1]:
            slope = np.maximum(seconds[-1] - seconds[-2], 0.0) / (sizes[-1] - sizes[-2])
            return seconds[-1] + slope * (requests - sizes[-1])
        return np.array([np.interp(requests, sizes, column) for column in seconds.T])
