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

# Another number of drafts must gain this much more
STARTS = 1.01
# Standard deviations of the bounds
SURE = 2.0
# Steps of an exploration; all but the first verify the drafts of the one before
PROBE = 4
# Steps between explorations: the first time, and at most
WAIT = 32
MAX_WAIT = 4096


@dataclass(slots=True)
class Choice:
    """A number of drafts, beside the current one."""

    drafts: int
    tokens: float  # of a request
    cost: float  # of a step
    gain: float  # tokens over cost
    highest: float  # the gain at the upper bound of what is known


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
    """

    requests: int
    prompt_tokens: int
    verified: int | None
    drafted: int


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
        steady = step.verified == step.drafted and not step.prompt_tokens
        if seconds is not None and steady:
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
        self.acceptance.forget_others(req_ids)
        choices = self._choices(requests, prompt_tokens, req_ids, kinds)
        self.best = max(choices, key=lambda choice: choice.gain)
        if self.best.gain > STARTS:
            self.current = self.best.drafts
            self.exploration.wait = WAIT
        return self._explored(requests, choices)

    def _choices(
        self,
        requests: int,
        prompt_tokens: int,
        req_ids: Sequence[str],
        kinds: Sequence[int],
    ) -> list[Choice]:
        share = len(req_ids) / requests  # of the requests may draft
        accepted = self.acceptance.per_request(req_ids, kinds)
        present = set(kinds)
        now = 1 + share * accepted[self.current]
        choices = []
        for drafts in self.counts:
            cost, error = self.seconds.relative(
                requests, prompt_tokens, self.current, drafts
            )
            tokens = (1 + share * accepted[drafts]) / now
            more = share * SURE * self.acceptance.deviation(present, drafts) / now
            bound = (tokens + more) / cost / max(1 - SURE * error, 0.5)
            choices.append(Choice(drafts, tokens, cost, tokens / cost, bound))
        return choices

    def _explored(self, requests: int, choices: list[Choice]) -> int:
        """The current number of drafts, or another for the sake of what it shows."""
        exploration = self.exploration
        if exploration.left:
            exploration.left -= 1
            self.exploring = True
            if not exploration.left:
                exploration.ready = self._step + exploration.wait
            return exploration.drafts
        if self._step < exploration.ready:
            return self.current
        # The table may be wrong, so each size of batch is compared once
        opposite = 0 if self.current else self.counts[-1]
        if self.seconds.lacks(requests, self.current, opposite):
            return self._explore(opposite)
        others = [choice for choice in choices if choice.drafts != self.current]
        other = max(others, key=lambda choice: choice.highest)
        return self._explore(other.drafts) if other.highest > STARTS else self.current

    def _explore(self, drafts: int) -> int:
        self.exploration.drafts = drafts
        self.exploration.left = PROBE - 1
        self.exploration.wait = min(2 * self.exploration.wait, MAX_WAIT)
        self.exploring = True
        return drafts
