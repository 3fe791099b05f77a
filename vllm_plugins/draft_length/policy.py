# SPDX-License-Identifier: Apache-2.0
"""The number of drafts of a step: the one with the most expected tokens a second.

With S_k a request's expected accepted drafts (acceptance.py) and c_k the seconds of a
step with k drafts over one without (seconds.py), k drafts gain (1 + S_k) / c_k. The
policy takes the best k, and explores another for PROBE steps where its gain would be
better at the upper bound of what is known. Each exploration narrows the bound, so
explorations end by themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from vllm_ppd.vllm_plugins.draft_length.acceptance import MAX_FOLLOWED, Acceptance
from vllm_ppd.vllm_plugins.draft_length.costs import StepCosts
from vllm_ppd.vllm_plugins.draft_length.seconds import StepSeconds

# Another number of drafts must gain this much more
STARTS = 1.01
# Standard deviations of the bounds
SURE = 2.0
# Steps of an exploration; all but the first verify the drafts of the one before
PROBE = 4
# A choice holds for these steps, unless the load changes
HELD = 4
# Explorations begin at a multiple of these steps
CHECKED = 2 * HELD
# Steps between explorations: the first time, and at most
WAIT = 32
MAX_WAIT = 4096
NO_LIMITS: Mapping[str, int] = MappingProxyType({})


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
    """

    requests: int
    prompt_tokens: int
    verified: int | None
    drafted: int

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
        self.latest = self.current  # what the latest choice was
        self._step = 0
        self._load = (0, 0)  # of the latest choice: requests, tokens of prompts
        self._unseen = 0  # steps since acceptance was observed
        self._verified: int | None = 0  # drafts of a request in the latest step

    def learns(self, step: Step) -> bool:
        """Whether to observe the acceptance of a step. Of large batches one step in
        several is enough, and the first with another number of drafts.
        """
        self._unseen += 1
        changed = step.verified != self._verified
        self._verified = step.verified
        if not changed and self._unseen * MAX_FOLLOWED < step.requests:
            return False
        self._unseen = 0
        return True

    def observe(
        self,
        step: Step,
        seconds: float | None,
        req_ids: Sequence[str],
        kinds: Sequence[int],
        emitted: Sequence[int],
        limits: Mapping[str, int] = NO_LIMITS,
    ) -> None:
        """Count a step.

        Args:
            step: as scheduled.
            seconds: that it took; None if the engine waited for requests.
            req_ids, kinds, emitted: of the requests that may draft and emitted tokens;
                all of them had the step's verified drafts. Empty if the step's
                acceptance is not observed.
            limits: the most drafts of requests that have such a number.
        """
        if step.verified is None:
            return
        if seconds is not None and step.steady():
            self.seconds.add(step.requests, step.drafted, seconds)
        if not step.verified:
            self.acceptance.grow_old()
        elif req_ids:
            self.acceptance.observe(
                req_ids,
                kinds,
                step.verified,
                emitted,
                limits,
            )

    def holds(self, requests: int, prompt_tokens: int) -> bool:
        """Whether the latest choice holds after a step; else choose() has to be called."""
        next_step = self._step + 1
        if (
            self.exploration.left
            or not next_step % HELD
            or self._load != (requests, prompt_tokens)
        ):
            return False
        self._step = next_step
        self.exploring = False
        return True

    def choose(
        self,
        requests: int,
        prompt_tokens: int,
        req_ids: Sequence[str],
        kinds: Sequence[int],
        limits: Mapping[str, int] = NO_LIMITS,
    ) -> int:
        """The number of drafts after a step.

        Args:
            requests: that decode in the next step.
            prompt_tokens: that the next step is expected to read.
            req_ids, kinds: of the requests that may draft.
            limits: the most drafts of requests that have such a number.
        """
        self._step += 1
        self._load = requests, prompt_tokens
        self.exploring = False
        self.latest = 0
        if req_ids:
            share = len(req_ids) / requests
            self.latest = self._chosen(
                requests,
                prompt_tokens,
                share,
                req_ids,
                kinds,
                limits,
            )
        return self.latest

    def _chosen(
        self,
        requests: int,
        prompt_tokens: int,
        share: float,
        req_ids: Sequence[str],
        kinds: Sequence[int],
        limits: Mapping[str, int],
    ) -> int:
        """As choose(); `share` of the requests may draft."""
        exploration = self.exploration
        if exploration.left:
            exploration.left -= 1
            exploration.ready = self._step + exploration.wait
            self.exploring = True
            return exploration.drafts
        self.acceptance.learn()
        self.acceptance.forget_others(req_ids)
        accepted = self.acceptance.per_request(req_ids, kinds, limits)
        tokens = [1 + share * mean for mean in accepted]
        others = self._others(requests, prompt_tokens, tokens)
        self.best = max(others, key=Choice.gain)
        if self.best.gain() > STARTS:
            self.current = self.best.drafts
            exploration.wait = WAIT
        elif self._step >= exploration.ready and not self._step % CHECKED:
            return self._explored(requests, share, others, set(kinds))
        return self.current

    def _others(
        self, requests: int, prompt_tokens: int, tokens: list[float]
    ) -> list[Choice]:
        """The numbers of drafts beside the current one, given a request's expected
        tokens with each number.
        """
        now = tokens[self.current]
        choices = []
        for drafts in self.counts:
            if drafts != self.current:
                cost, error = self.seconds.relative(
                    requests, prompt_tokens, self.current, drafts
                )
                choices.append(Choice(drafts, tokens[drafts] / now, cost, error))
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
