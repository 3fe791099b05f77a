# SPDX-License-Identifier: Apache-2.0
"""The plan of a step's drafts, their number k and their exit: the one with the most
expected tokens a second.

With S a request's expected accepted drafts under a plan (acceptance.py) and c the seconds
of a step with that plan over one without drafts (seconds.py), the plan gains (1 + S) / c.
The policy takes the best plan, and explores another for PROBE steps where its gain would
be better at the upper bound of what is known. Each exploration narrows the bound, so
explorations end by themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_ppd.vllm_plugins.draft_length.acceptance import Acceptance
from vllm_ppd.vllm_plugins.draft_length.costs import NO_DRAFTS, Plan, StepCosts
from vllm_ppd.vllm_plugins.draft_length.learning import Orders
from vllm_ppd.vllm_plugins.draft_length.seconds import StepSeconds

# Attribute that we add to a SchedulerOutput: its Step
STEP = "vllm_ppd_step"
# Another plan must gain this much more
STARTS = 1.01
# Standard deviations of the bounds
SURE = 2.0
# Steps of an exploration; all but the first verify the drafts of the one before
PROBE = 4
# Requests of a step whose acceptance is observed, in the mean
OBSERVED = 16
# A choice holds for these steps, unless the load changes
HELD = 4
# Explorations begin at a multiple of these steps
CHECKED = 2 * HELD
# Steps between explorations: the first time, and at most
WAIT = 32
MAX_WAIT = 4096


@dataclass(slots=True)
class Choice:
    """A plan, beside the current one."""

    plan: Plan
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
    """When a plan may be explored next."""

    ready: int = 0  # number of the step
    wait: int = WAIT


@dataclass(slots=True)
class Step:
    """A scheduled step, which travels with its output.

    Attributes:
        requests: that decode.
        prompt_tokens: beside them.
        verified: plan of the verified drafts; None if requests differ.
        drafted: plan of the drafts that are made.
        useful: whether a request could use drafts.
        orders: about learning; None if nothing is learned.
    """

    requests: int
    prompt_tokens: int
    verified: Plan | None
    drafted: Plan
    useful: bool = True
    orders: Orders | None = None

    def steady(self) -> bool:
        """Whether the step decoded alone, and made drafts as it verified them."""
        alone = self.requests > 0 and not self.prompt_tokens
        return alone and self.verified == self.drafted


class DraftPolicy:
    """Chooses the plan of each step's drafts.

    Args:
        costs: measured at the start.
        kinds: of requests, see Acceptance.
        clock: whether steps as served count beside the table.
        limits: the most drafts of requests that have such a number; the owner keeps it
            up to date.
    """

    def __init__(
        self, costs: StepCosts, kinds: int, clock: bool, limits: Mapping[str, int]
    ) -> None:
        self.plans = costs.plans
        self.seconds = StepSeconds(costs, clock)
        # By exit, as nothing is known of one from another's drafts
        self.acceptance = [
            Acceptance(costs.max_drafts, kinds, limits)
            for _ in range(costs.exits)
        ]
        self.explorations = {plan: Exploration() for plan in self.plans}
        self._explored = NO_DRAFTS
        self._left = 0  # steps of the current exploration
        self.current = Plan(costs.max_drafts)
        self.best: Choice | None = None  # of the latest step
        self.exploring = False
        self.latest = self.current  # what the latest choice was
        self._step = 0
        self._load = (0, 0)  # of the latest choice: requests, tokens of prompts
        self._unseen = 0  # steps since acceptance was observed
        self._verified: Plan | None = NO_DRAFTS  # of the latest step

    def learns(self, step: Step) -> bool:
        """Whether to observe the acceptance of a step. Of large batches one step in
        several is enough, and the first with another plan.
        """
        self._unseen += 1
        changed = step.verified != self._verified
        self._verified = step.verified
        if not changed and self._unseen * OBSERVED < step.requests:
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
    ) -> None:
        """Count a step.

        Args:
            step: as scheduled.
            seconds: that it took; None if the engine waited for requests.
            req_ids, kinds, emitted: of the requests that may draft and emitted tokens;
                all of them had the step's verified drafts. Empty if the step's
                acceptance is not observed.
        """
        if step.verified is None:
            return
        if seconds is not None and step.steady():
            self.seconds.add(step.requests, step.drafted, seconds)
        drafts, exit = step.verified
        for number, acceptance in enumerate(self.acceptance):
            if not drafts or number != exit:
                acceptance.age += 1
            elif req_ids:
                acceptance.observe(req_ids, kinds, drafts, emitted)

    def holds(self, requests: int, prompt_tokens: int) -> bool:
        """Whether the latest choice holds after a step; else choose() has to be called."""
        next_step = self._step + 1
        if (
            self._left
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
    ) -> Plan:
        """The plan of the drafts after a step.

        Args:
            requests: that decode in the next step.
            prompt_tokens: that the next step is expected to read.
            req_ids, kinds: of the requests that may draft.
        """
        self._step += 1
        self._load = requests, prompt_tokens
        self.exploring = False
        self.latest = NO_DRAFTS
        if req_ids:
            self.latest = self._best(requests, prompt_tokens, req_ids, kinds)
        return self.latest

    def _best(
        self,
        requests: int,
        prompt_tokens: int,
        req_ids: Sequence[str],
        kinds: Sequence[int],
    ) -> Plan:
        """As choose(), where some requests may draft."""
        if self._left:
            self._left -= 1
            self.exploring = True
            return self._explored
        share = len(req_ids) / requests
        tokens = []
        for acceptance in self.acceptance:
            acceptance.learn()
            acceptance.forget_others(req_ids)
            accepted = acceptance.per_request(req_ids, kinds)
            tokens.append([1 + share * mean for mean in accepted])
        others = self._others(requests, prompt_tokens, tokens)
        self.best = max(others, key=Choice.gain)
        if self.best.gain() > STARTS:
            self.current = self.best.plan
            for exploration in self.explorations.values():
                exploration.wait = WAIT
        elif not self._step % CHECKED:
            return self._explore(requests, share, others, set(kinds))
        return self.current

    def _others(
        self, requests: int, prompt_tokens: int, tokens: list[list[float]]
    ) -> list[Choice]:
        """The plans beside the current one.

        Args:
            requests, prompt_tokens: see choose().
            tokens: expected of a request, by exit and number of drafts.
        """
        now = tokens[self.current.exit][self.current.drafts]
        choices = []
        for plan in self.plans:
            if plan != self.current:
                cost, error = self.seconds.relative(
                    requests, prompt_tokens, self.current, plan
                )
                more = tokens[plan.exit][plan.drafts] / now
                choices.append(Choice(plan, more, cost, error))
        return choices

    def _explore(
        self, requests: int, share: float, others: list[Choice], kinds: set[int]
    ) -> Plan:
        """The current plan, or another for the sake of what it shows."""
        most = 0 if self.current.drafts else self.plans[-1].drafts
        best = self.current
        highest = STARTS
        for choice in sorted(others, key=Choice.gain, reverse=True):
            drafts, exit = choice.plan
            # The table may be wrong, so each size of batch is compared once
            if drafts == most and self.seconds.lacks(
                requests, self.current, choice.plan
            ):
                best = choice.plan
                break
            if self._step < self.explorations[choice.plan].ready:
                continue
            deviation = self.acceptance[exit].deviation(kinds, drafts)
            bound = choice.highest(share * deviation)
            if bound > highest:
                highest = bound
                best = choice.plan
        if best != self.current:
            exploration = self.explorations[best]
            exploration.wait = min(2 * exploration.wait, MAX_WAIT)
            exploration.ready = self._step + PROBE + exploration.wait
            self._explored = best
            self._left = PROBE - 1
            self.exploring = True
        return best
