# SPDX-License-Identifier: Apache-2.0
"""Step costs: seconds of a decode step by batch size and by what it drafts."""

import functools
import os
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy import ndarray
from pydantic import BaseModel, Field, model_validator
from typing_extensions import Self

# Attribute that we add to vLLM's KVCacheConfig: a CostTable, or None if not measured
STEP_COSTS = "vllm_ppd_step_costs"
StepSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Plan(NamedTuple):
    """What a step drafts."""

    drafts: int  # of each request
    exit: int = (
        0  # index of the exit layer at which they are read; 0 without drafts
    )


NO_DRAFTS = Plan(0)


def plans_of(counts: list[int], exits: int) -> list[Plan]:
    """All plans.

    Args:
        counts: drafts of each request, ascending from 0.
        exits: number of exit layers; 1 for other methods.
    """
    drafting = [
        Plan(count, exit) for exit in range(exits) for count in counts[1:]
    ]
    return [NO_DRAFTS, *drafting]


class CostTable(BaseModel):
    """Seconds of decode steps at the batch sizes and with the plans that were measured."""

    sizes: list[int] = Field(min_length=1)  # requests, ascending
    counts: list[int] = Field(
        min_length=1
    )  # drafts per request, ascending from 0
    exits: int = Field(1, ge=1)  # number of exit layers
    seconds: list[list[StepSeconds]]  # [sizes, plans], in the fastest round

    @property
    def plans(self) -> list[Plan]:
        return plans_of(self.counts, self.exits)

    @model_validator(mode="after")
    def _rectangular(self) -> Self:
        plans = len(self.plans)
        if [len(row) for row in self.seconds] != [plans] * len(self.sizes):
            raise ValueError(
                f"seconds must be {len(self.sizes)} x {plans} numbers"
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
    """Seconds of steps, interpolated linearly in requests and tokens.

    A step with fewer requests or drafts takes no longer than one with more: if it
    seemed to, something else ran on the machine. Beyond the largest measured batch,
    seconds are extrapolated from the two largest.
    """

    def __init__(self, table: CostTable) -> None:
        self.max_drafts = table.counts[-1]
        self.exits = table.exits
        self.plans = table.plans  # measured ones
        self.sizes = sizes = np.array(table.sizes, dtype=float)
        # Plan -> [sizes]
        by_plan: dict[Plan, ndarray] = {}
        measured = np.array(table.seconds)
        drafting = len(table.counts) - 1
        for exit in range(self.exits):
            first = 1 + exit * drafting
            columns = [0, *range(first, first + drafting)]
            # For each step, the least seconds of steps with no fewer requests and drafts
            falling = measured[::-1, columns[::-1]]
            for axis in (0, 1):
                falling = np.minimum.accumulate(falling, axis)
            ascending = falling[::-1, ::-1]
            for column, count in enumerate(table.counts):
                plan = Plan(count, exit if count else 0)
                by_plan.setdefault(plan, ascending[:, column])
        self._decoding = functools.cache(
            lambda requests, plan: _at(requests, sizes, by_plan[plan])
        )
        # Tokens of steps without drafting, ascending, and their seconds. The last is the
        # verification of the largest batch's drafts, less what drafting takes for one.
        plain = by_plan[NO_DRAFTS]
        most = by_plan[Plan(self.max_drafts)]
        verified = max(most[-1] - (most[0] - plain[0]), plain[-1])
        self._tokens = np.append(sizes, sizes[-1] * (1 + self.max_drafts))
        self._plain = np.append(plain, verified)

    def seconds(self, requests: int, prompt_tokens: int, plan: Plan) -> float:
        """Seconds of a step that verifies and makes the drafts of a plan.

        Args:
            requests: that decode.
            prompt_tokens: read beside them.
            plan: a measured one.
        """
        seconds = self._decoding(requests, plan)
        if prompt_tokens:
            tokens = requests * (1 + plan.drafts)
            longer = _at(tokens + prompt_tokens, self._tokens, self._plain)
            seconds += longer - _at(tokens, self._tokens, self._plain)
        return seconds


def _at(x: float, places: ndarray, values: ndarray) -> float:
    """Linear interpolation; beyond the last place along the last two, never falling."""
    if len(places) > 1 and x > places[-1]:
        slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
        return float(values[-1] + max(slope, 0.0) * (x - places[-1]))
    return float(np.interp(x, places, values))
