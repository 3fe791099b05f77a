# SPDX-License-Identifier: Apache-2.0
"""The number of drafts of a step: the one with the most expected tokens a second.

With S_k a request's expected accepted drafts (acceptance.py) and c_k the seconds of a
step with k drafts over one without (seconds.py), k drafts gain (1 + S_k) / c_k. The
policy takes the best k, and explores another for PROBE steps where its gain would be
better at the upper bound of what is known. Each exploration narrows the bound, so
explorations end by themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ppd.vllm_plugins.draft_length.acceptance import Acceptance
from vllm_ppd.vllm_plugins.draft_length.costs import StepCosts
from vllm_ppd.vllm_plugins.draft_length.seconds import StepSeconds

# Attribute of a SchedulerOutput: its Step
STEP = "vllm_ppd_step"
# Another number of drafts must gain this much more
STARTS = 1.01
# Standard deviations of the bounds
SURE = 2.0
# Steps of an exploration; all but the first verify the drafts of the one before
PROBE = 4
# Explorations begin at a multiple of these steps
CHECKED = 8
# Steps between explorations: the first time, and at most
WAIT = 32
MAX_WAIT = 4096


@dataclass(slots=True)
class Choice:
    """A number of drafts, beside the current one."""

    drafts: int
    tokens: float  # of a request
    cost: float  # seconds of a step
    error: float  # relative standard deviation of the cost

    def gain(self) -> float:
        return self.tokens / self.cost

    def highest(self, deviation: float) -> float:
        """The gain at the upper bound of what is known.

        Args:
            deviation: of the tokens.
        """
        tokens = self.tokens + SURE * deviation
        return tokens / (self.cost * max(1 - SURE * self.error, 0.5))


@dataclass(slots=True)
class Exploration:
    """When the policy may explore next."""

    drafts: int = 0
    left: int = 0  # steps of the current one
    ready: int = 0  # number of the step
    wait: int = WAIT


@dataclass(slots=True)
class Step:
    """A scheduled step, which travels with its output.

    Attributes:
        requests: that decode.
        prompt_tokens: beside them.
        verified: drafts of each request; None if requests differ.
        drafted: drafts that each request makes.
        useful: whether a request could use drafts.
    """

    requests: int
    prompt_tokens: int
    verified: int | None
    drafted: int
    useful: bool = True

    def steady(self) -> bool:
        """Whether the step decoded alone, and made as many drafts as it verified."""
        alone = self.requests > 0 and not self.prompt_tokens
        return alone and self.verified == self.drafted


class DraftPolicy:
    """Chooses the number of drafts of each step.

    Args:
        costs: measured at the start.
        kinds: of requests, see Acceptance.
        clock: whether steps as served count beside the table.
    """

    def __init__(self, costs: StepCosts, kinds: int, clock: bool = True) -> None:
        self.counts = costs.counts
        self.seconds = StepSeconds(costs, clock)
        self.acceptance = Acceptance(costs.max_drafts, kinds)
        self.exploration = Exploration()
        self.current = costs.max_drafts
        self.best: Choice | None = None  # of the latest step
        self.exploring = False
        self._step = 0

    def observe(
        self,
        step: Step,
        seconds: float | None,
        req_ids: Sequence[str],
        kinds: Sequence[int],
        emitted: Sequence[int],
    ) -> None:
        """Count a step.

        Args:
            step: as scheduled.
            seconds: that it took; None if the engine waited for requests.
            req_ids, kinds, emitted: of the requests that may draft and emitted tokens;
                all of them had the step's verified drafts.
        """
        if step.verified is None:
            return
        if seconds is not None and step.steady():
            self.seconds.add(step.requests, step.drafted, seconds)
        if step.verified and req_ids:
            self.acceptance.observe(req_ids, kinds, step.verified, emitted)
        else:
            self.acceptance.grow_old()

    def choose(
        self,
        requests: int,
        prompt_tokens: int,
        req_ids: Sequence[str],
        kinds: Sequence[int],
    ) -> int:
        """The number of drafts after a step.

        Args:
            requests: that decode in the next step.
            prompt_tokens: that the next step is expected to read.
            req_ids, kinds: of the requests that may draft.
        """
        self._step += 1
        self.exploring = False
        if not req_ids:
            return 0
        exploration = self.exploration
        if exploration.left:
            exploration.left -= 1
            exploration.ready = self._step + exploration.wait
            self.exploring = True
            return exploration.drafts
        self.acceptance.forget_others(req_ids)
        share = len(req_ids) / requests  # of the requests may draft
        others = self._others(requests, prompt_tokens, share, req_ids, kinds)
        self.best = max(others, key=Choice.gain)
        if self.best.gain() > STARTS:
            self.current = self.best.drafts
            exploration.wait = WAIT
        elif self._step >= exploration.ready and not self._step % CHECKED:
            return self._explored(requests, share, others, set(kinds))
        return self.current

    def _others(
        self,
        requests: int,
        prompt_tokens: int,
        share: float,
        req_ids: Sequence[str],
        kinds: Sequence[int],
    ) -> list[Choice]:
        """The numbers of drafts beside the current one."""
        accepted = self.acceptance.per_request(req_ids, kinds)
        now = 1 + share * accepted[self.current]
        choices = []
        for drafts in self.counts:
            if drafts != self.current:
                cost, error = self.seconds.relative(
                    requests, prompt_tokens, self.current, drafts
                )
                tokens = 1 + share * accepted[drafts]
                choices.append(Choice(drafts, tokens / now, cost, error))
        return choices

    def _explored(
        self, requests: int, share: float, others: list[Choice], kinds: set[int]
    ) -> int:
        """The current number of drafts, or another for the sake of what it shows."""
        # The table may be wrong, so each size of batch is compared once
        opposite = 0 if self.current else self.counts[-1]
        if self.seconds.lacks(requests, self.current, opposite):
            return self._explore(opposite)
        for choice in sorted(others, key=Choice.gain, reverse=True):
            deviation = self.acceptance.deviation(kinds, choice.drafts)
            if choice.highest(share * deviation) > STARTS:
                return self._explore(choice.drafts)
        return self.current

    def _explore(self, drafts: int) -> int:
        self.exploration.drafts = drafts
        self.exploration.left = PROBE - 1
        self.exploration.wait = min(2 * self.exploration.wait, MAX_WAIT)
        self.exploring = True
        return drafts
