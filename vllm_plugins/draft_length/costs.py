# SPDX-License-Identifier: Apache-2.0
"""Step costs: seconds of a decode step by batch size and drafts per request."""

import os
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field, model_validator
from typing_extensions import Self

StepSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CostTable(BaseModel):
    """Seconds of decode steps at the batch sizes and numbers of drafts that were measured."""

    sizes: list[int] = Field(min_length=1)  # requests, ascending
    counts: list[int] = Field(
        min_length=1
    )  # drafts per request, ascending from 0
    seconds: list[list[StepSeconds]]  # [sizes, counts], in the fastest round

    @model_validator(mode="after")
    def _rectangular(self) -> Self:
        if [len(row) for row in self.seconds] != [len(self.counts)] * len(
            self.sizes
        ):
            raise ValueError(
                f"seconds must be {len(self.sizes)} x {len(self.counts)} numbers"
            )
        return self

    def save(self, path: Path) -> None:
        """Write a file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # data-parallel ranks write the same file
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(self.model_dump_json())
        part.replace(path)


class StepCosts:
    """Seconds of steps, interpolated linearly in requests, drafts and tokens.

    A step with fewer requests or drafts takes no longer than one with more: if it
    seemed to, something else ran on the machine. Beyond the largest measured batch,
    seconds are extrapolated from the two largest.
    """

    def __init__(self, table: CostTable) -> None:
        self.max_drafts = table.counts[-1]
        self.counts = tuple(table.counts)  # measured numbers of drafts, from 0 on
        self.sizes = np.array(table.sizes, dtype=float)
        drafts = np.arange(1 + self.max_drafts)
        ascending = _least_of_larger(np.array(table.seconds))
        # [sizes, 1 + N]
        self._seconds = np.array(
            [np.interp(drafts, table.counts, row) for row in ascending]
        )
        self._decoding: dict[tuple[int, int], float] = {}
        # Tokens of steps without drafting, ascending, and their seconds. The last is the
        # verification of the largest batch's drafts, less what drafting takes for one.
        drafting = self._seconds[0, -1] - self._seconds[0, 0]
        verified = max(self._seconds[-1, -1] - drafting, self._seconds[-1, 0])
        self._tokens = np.append(
            self.sizes, self.sizes[-1] * (1 + self.max_drafts)
        )
        self._plain = np.append(self._seconds[:, 0], verified)

    def seconds(self, requests: int, prompt_tokens: int, drafts: int) -> float:
        """Seconds of a step that verifies and makes a number of drafts.

        Args:
            requests: that decode.
            prompt_tokens: read beside them.
            drafts: of each request.
        """
        key = requests, drafts
        if key not in self._decoding:
            self._decoding[key] = _at(
                requests, self.sizes, self._seconds[:, drafts]
            )
        seconds = self._decoding[key]
        if prompt_tokens:
            tokens = requests * (1 + drafts)
            longer = _at(tokens + prompt_tokens, self._tokens, self._plain)
            seconds += longer - _at(tokens, self._tokens, self._plain)
        return seconds


def _at(x: float, places: np.ndarray, values: np.ndarray) -> float:
    """Linear interpolation; beyond the last place along the last two, never falling."""
    if len(places) > 1 and x > places[-1]:
        slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
        return float(values[-1] + max(slope, 0.0) * (x - places[-1]))
    return float(np.interp(x, places, values))


def _least_of_larger(seconds: np.ndarray) -> np.ndarray:
    """For each step, the least seconds of steps with no fewer requests and drafts:
    [sizes, counts].
    """
    return np.minimum.accumulate(
        np.minimum.accumulate(seconds[::-1, ::-1], axis=0), axis=1
    )[::-1, ::-1]
