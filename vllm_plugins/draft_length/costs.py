# SPDX-License-Identifier: Apache-2.0
"""Step costs: seconds of a decode step by batch size and drafts per request."""

import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, model_validator
from typing_extensions import Self

StepSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LIMIT = 0.25  # of a step; a wrong number of drafts loses at most the error of the costs


class CostTable(BaseModel):
    """Seconds of decode steps at the batch sizes and numbers of drafts that were measured."""

    sizes: list[int] = Field(min_length=1)  # requests, ascending
    counts: list[int] = Field(min_length=1)  # drafts per request, ascending from 0
    seconds: list[list[StepSeconds]]  # [sizes, counts], in the fastest round
    # [sizes, counts], in the second fastest round
    second_fastest: list[list[StepSeconds]] | None = None

    @model_validator(mode="after")
    def _rectangular(self) -> Self:
        for table in (
            self.seconds,
            self.seconds if self.second_fastest is None else self.second_fastest,
        ):
            if [len(row) for row in table] != [len(self.counts)] * len(self.sizes):
                raise ValueError(
                    f"seconds must be {len(self.sizes)} x {len(self.counts)} numbers"
                )
        return self

    def implausible(self) -> str:
        """The evidence that something else ran on the machine during the measurement;
        empty if there is none.

        Rounds of the same step differ by more than LIMIT, or a step takes more than
        LIMIT longer than the second round of one with no fewer requests and drafts.
        """
        if self.second_fastest is None:
            return "the spread of their rounds is not recorded"
        fastest = np.array(self.seconds)
        second = np.array(self.second_fastest)
        spread = second / fastest
        fall = fastest / _least_of_larger(second)
        i, j = np.unravel_index(spread.argmax(), spread.shape)
        if spread[i, j] > 1 + LIMIT:
            return (
                f"{self._step(i, j)}, and {1000 * second[i, j]:.1f} ms in the next "
                "fastest round"
            )
        i, j = np.unravel_index(fall.argmax(), fall.shape)
        if fall[i, j] > 1 + LIMIT:
            more, longer = np.unravel_index(
                second[i:, j:].argmin(), second[i:, j:].shape
            )
            return f"{self._step(i, j)}, {self._step(i + more, j + longer)}"
        return ""

    def _step(self, i: Any, j: Any) -> str:
        requests = self.sizes[i]
        drafts = self.counts[j]
        name = f"{requests} request{'s' * (requests > 1)} with {drafts} draft{'s' * (drafts != 1)}"
        return f"{name} {1000 * self.seconds[i][j]:.1f} ms"


class MeasuredCosts(BaseModel):
    """Costs of an engine's steps."""

    method: CostTable

    def save(self, path: Path) -> None:
        """Write a file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # data-parallel ranks write the same file
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(self.model_dump_json())
        part.replace(path)


class StepCosts:
    """Relative costs of steps, interpolated linearly in batch size and drafts.

    A step with fewer requests or drafts takes no longer than one with more: if it
    seemed to, something else ran on the machine. Beyond the largest measured batch,
    seconds are extrapolated from the two largest.
    """

    def __init__(self, table: CostTable) -> None:
        self.most = table.counts[-1]
        self.counts = tuple(table.counts[1:])  # measured numbers of drafts
        self._sizes = np.array(table.sizes, dtype=float)
        drafts = np.arange(1 + self.most)
        ascending = _least_of_larger(np.array(table.seconds))
        # [sizes, 1 + N]
        self._seconds = np.array(
            [np.interp(drafts, table.counts, row) for row in ascending]
        )
        self._relative: dict[int, np.ndarray] = {}

    def relative(self, requests: int) -> np.ndarray:
        """Costs of steps with 0, 1, ... drafts, relative to a step without drafts: [1 +
        N], none below 1.
        """
        if requests not in self._relative:
            seconds = self._at(requests)
            self._relative[requests] = np.maximum(seconds / seconds[0], 1.0)
        return self._relative[requests]

    def _at(self, requests: int) -> np.ndarray:
        sizes = self._sizes
        seconds = self._seconds
        if len(sizes) > 1 and requests > sizes[-1]:
            slope = np.maximum(seconds[-1] - seconds[-2], 0.0) / (sizes[-1] - sizes[-2])
            return seconds[-1] + slope * (requests - sizes[-1])
        return np.array([np.interp(requests, sizes, column) for column in seconds.T])


def _least_of_larger(seconds: np.ndarray) -> np.ndarray:
    """For each step, the least seconds of steps with no fewer requests and drafts:
    [sizes, counts].
    """
    return np.minimum.accumulate(
        np.minimum.accumulate(seconds[::-1, ::-1], axis=0), axis=1
    )[::-1, ::-1]
