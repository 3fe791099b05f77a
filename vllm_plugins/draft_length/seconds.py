# SPDX-License-Identifier: Apache-2.0
"""Seconds of steps with a plan of drafts, relative to those without drafts.

The table of the start (costs.py) is the prior. Steps as served correct it, by bucket:
the power of two of the requests. Within a bucket a step counts as its seconds over the
table's, so its batches need not be the same. Plans are compared within a time only, as
contexts grow and clocks change.

Tokens that drafts gain save later steps of decoding alone. So the price of drafts beside
a prompt is what they add to that step, over the seconds of a step of decoding alone.
"""

import functools
import math
from collections import defaultdict
from itertools import combinations

from vllm_ppd.vllm_plugins.draft_length.costs import NO_DRAFTS, Plan, StepCosts

# Steps with a plan in a bucket that count
MEMORY = 32
# Steps of the bucket beyond which two plans are not compared
NEARBY = 256
# Between steps at which means end and comparisons are made anew
CHECKED = 8
# Relative standard deviations: of a step's seconds, and of the table's costs
NOISE = 0.1
TABLE_ERROR = 0.1
# No comparison is surer than this, and it weighs half after so many steps
LEAST_ERROR = 0.01
HALF_LIFE = 1024.0
# A step counts as at most so many times the table's or a mean: the machine did
# something else
CLIP = 4.0
MAX_COSTS = 10_000  # costs of the table that are kept


class Mean:
    """Mean of the latest steps' seconds, over the table's."""

    def __init__(self) -> None:
        self.value = 1.0
        self.steps = 0
        self.last = 0  # number of the step in its bucket

    def add(self, ratio: float, step: int) -> None:
        self.steps = min(self.steps + 1, MEMORY)
        self.value += (ratio - self.value) / self.steps
        self.last = step


class Bucket:
    """Steps of similar batches, and what they say of the table's relative costs."""

    def __init__(self) -> None:
        self.step = 0
        self.means: dict[Plan, Mean] = {}
        # Two plans -> factor on the table's cost of the second over the first, its
        # precision, and the step at which it was kept
        self.kept: dict[tuple[Plan, Plan], tuple[float, float, int]] = {}
        self.factor = functools.cache(self._factor)

    def add(self, plan: Plan, ratio: float) -> None:
        """Add a step that verified and made the drafts of a plan."""
        self.step += 1
        mean = self.means.setdefault(plan, Mean())
        known = [other.value for other in self.means.values() if other.steps]
        ratio = min(ratio, CLIP * max(known, default=1.0))
        if not self.step % CHECKED:
            self._keep_comparisons()
            self.factor.cache_clear()
        mean.add(ratio, self.step)

    def _keep_comparisons(self) -> None:
        """Keep the comparisons with means that end."""
        ended = [
            plan
            for plan, mean in self.means.items()
            if mean.steps and self.step - mean.last > NEARBY
        ]
        for first, second in combinations(sorted(self.means), 2):
            if first in ended or second in ended:
                factor, precision = self.evidence(first, second)
                self.kept[first, second] = factor, precision, self.step
        for plan in ended:
            self.means[plan].steps = 0

    def evidence(self, first: Plan, second: Plan) -> tuple[float, float]:
        """(Factor on the table's cost of `second` over `first`, its precision)."""
        factor, precision, step = self.kept.get((first, second), (1.0, 0.0, 0))
        precision *= 0.5 ** ((self.step - step) / HALF_LIFE)
        one = self.means.get(first)
        other = self.means.get(second)
        if one is None or other is None or not one.steps or not other.steps:
            return factor, precision
        new = 1 / (NOISE**2 * (1 / one.steps + 1 / other.steps))
        factor = factor * precision + new * other.value / one.value
        factor /= precision + new
        return factor, min(precision + new, LEAST_ERROR**-2)

    def _factor(self, first: Plan, second: Plan) -> tuple[float, float]:
        """(Factor on the table's cost of `second` over `first`, its relative error)."""
        if first > second:
            factor, error = self.factor(second, first)
            return 1 / factor, error
        factor, precision = self.evidence(first, second)
        prior = TABLE_ERROR**-2
        factor = (prior + factor * precision) / (prior + precision)
        return factor, 1 / (math.sqrt(prior + precision) * factor)


class StepSeconds:
    """Relative costs of steps, from the table and from steps as served.

    Args:
        table: measured at the start.
        clock: whether steps as served count; else the table decides alone.
    """

    def __init__(self, table: StepCosts, clock: bool) -> None:
        self.table = table
        self.clock = clock
        self._buckets: defaultdict[int, Bucket] = defaultdict(Bucket)
        self._by_table = functools.lru_cache(MAX_COSTS)(self._added)

    def _bucket(self, requests: int) -> Bucket:
        return self._buckets[requests.bit_length()]

    def add(self, requests: int, plan: Plan, seconds: float) -> None:
        """Add a step as served that read no prompt.

        Args:
            requests: of the step.
            plan: of its drafts, both verified and made.
            seconds: of the step, while no other kept the device waiting.
        """
        if self.clock:
            expected = self.table.seconds(requests, 0, plan)
            self._bucket(requests).add(plan, seconds / expected)

    def lacks(self, requests: int, first: Plan, second: Plan) -> bool:
        """Whether the table alone compares two plans, asked in the last CHECKED of each
        MEMORY steps.
        """
        bucket = self._bucket(requests)
        if not self.clock or bucket.step % MEMORY < MEMORY - CHECKED:
            return False
        _, precision = bucket.evidence(*sorted((first, second)))
        return not precision

    def relative(
        self, requests: int, prompt_tokens: int, first: Plan, second: Plan
    ) -> tuple[float, float]:
        """(Cost of a step with plan `second` over one with `first`, relative error).

        Args:
            requests: that decode.
            prompt_tokens: beside them.
            first, second: plans.
        """
        cost = self._by_table(requests, prompt_tokens, second)
        cost /= self._by_table(requests, prompt_tokens, first)
        if first == second or not self.clock:
            return cost, 0.0
        factor, error = self._bucket(requests).factor(first, second)
        return cost * factor, error

    def _added(self, requests: int, prompt_tokens: int, plan: Plan) -> float:
        """1 + the seconds that drafts add, over those of a step of decoding alone."""
        seconds = self.table.seconds
        plain = seconds(requests, 0, NO_DRAFTS)
        added = seconds(requests, 0, plan) - plain
        if prompt_tokens:
            beside_prompt = seconds(requests, prompt_tokens, plan)
            beside_prompt -= seconds(requests, prompt_tokens, NO_DRAFTS)
            added = max(added, beside_prompt)
        return 1 + max(added, 0.0) / plain
