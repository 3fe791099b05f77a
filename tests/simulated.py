# SPDX-License-Identifier: Apache-2.0
"""An engine by arithmetic: steps by a roofline, acceptance by a random generator, and
the draft policy between them, as an asynchronous scheduler calls it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from vllm_ppd.vllm_plugins.draft_length import measure
from vllm_ppd.vllm_plugins.draft_length.costs import NO_DRAFTS, Plan, StepCosts
from vllm_ppd.vllm_plugins.draft_length.policy import DraftPolicy, Step
from vllm_ppd.vllm_plugins.engine.dummy_steps import STEPS


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step: memory or compute, whichever takes longer, and a fixed part."""

    weights: float  # seconds to read them
    token: float  # seconds to compute one token
    kv_token: float  # seconds to read a token of the KV cache
    fixed: float
    drafting: float  # seconds to make the drafts of a step
    exits: tuple[float, ...] = (0.0,)  # seconds of a pass to each exit

    def seconds(
        self,
        requests: int,
        prompt: int,
        verified: int,
        drafted: Plan,
        context: int,
    ) -> float:
        tokens = requests * (1 + verified) + prompt
        memory = self.weights + requests * context * self.kv_token
        drafting = drafted.drafts * self.exits[drafted.exit]
        if drafted.drafts:
            drafting += self.drafting
        return max(memory, tokens * self.token) + self.fixed + drafting


def on_h200(parameters: float, byte: float, ranks: int, kv: float) -> Roofline:
    """A dense model on H200s.

    Args:
        parameters: of the model.
        byte: bytes of each.
        ranks: of tensor parallelism.
        kv: bytes of a token's keys and values, in all ranks.
    """
    bandwidth = 4.8e12 * 0.8 * ranks
    peak = 989e12 * 0.7 * ranks * (2 if byte == 1 else 1)
    weights = parameters * byte / bandwidth
    fixed = 0.6e-3 if ranks == 1 else 2e-3
    return Roofline(
        weights,
        2 * parameters / peak,
        kv / bandwidth,
        fixed,
        0.1 * weights + 2e-4,
    )


ENGINES = {
    "8B": on_h200(
        8e9,
        2,
        1,
        131e3,
    ),
    "70B": on_h200(
        70e9,
        2,
        4,
        328e3,
    ),
    "405B": on_h200(
        405e9,
        1,
        8,
        258e3,
    ),
}


@dataclass
class Load:
    """What one step serves."""

    requests: int
    prompt: int = 0  # tokens read
    waiting: int = (
        0  # tokens that the next step will read, as known when this is scheduled
    )
    context: int = 200
    idle: bool = False  # the engine waited for requests before the step


@dataclass
class Result:
    """Seconds of a run, and those of the engine without drafts for the same tokens."""

    seconds: float = 0.0
    alone: float = 0.0
    plans: list[Plan] = field(default_factory=list)

    @property
    def drafts(self) -> list[int]:
        return [plan.drafts for plan in self.plans]

    @property
    def gain(self) -> float:
        return self.alone / self.seconds


def table_of(
    engine: Roofline,
    counts: Sequence[int],
    largest: int,
    noise: random.Random | None,
) -> StepCosts:
    """The table that an engine measures at its start."""
    clock = [0.0]

    def time_steps(requests: int, plans: Sequence[Plan]) -> list[float]:
        seconds = []
        for plan in plans:
            step = engine.seconds(
                requests,
                0,
                plan.drafts,
                plan,
                10,
            )
            if noise is not None:
                step *= noise.uniform(1.0, 1.1)
            seconds.append(step)
            clock[0] += STEPS * step
        return seconds

    stock = measure.time
    measure.time = SimpleNamespace(perf_counter=lambda: clock[0])  # type: ignore[assignment]
    try:
        return StepCosts(
            measure.measure_table(
                time_steps,
                largest,
                list(counts),
                lambda x: x,
                len(engine.exits),
            )
        )
    finally:
        measure.time = stock


def probability(length: float, drafts: int) -> float:
    """p with 1 + p + ... + p^drafts = length."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1 + drafts)) < length:
            low = middle
        else:
            high = middle
    return low


class Fixed:
    """A policy with one plan."""

    def __init__(self, plan: Plan) -> None:
        self.latest = plan

    def holds(self, *_: object) -> bool:
        return True

    learns = holds

    def choose(self, *_: object) -> Plan:
        return self.latest

    def observe(self, *_: object) -> None:
        pass


def run(
    engine: Roofline,
    policy: DraftPolicy | Fixed,
    loads: Iterable[Load],
    accepts: Callable[[int, int], float],
    seed: int = 0,
    noise: float = 0.1,
    skip: int = 0,
) -> Result:
    """Serve loads, a step each.

    Args:
        accepts: (number of the step, exit of its drafts) -> probability that a draft is
            accepted.
        noise: standard deviation of a step's seconds.
        skip: steps that are not measured.
    """
    rng = random.Random(seed)
    result = Result()
    made = NO_DRAFTS
    pending: tuple = ()
    for number, load in enumerate(loads):
        names = [str(i) for i in range(load.requests)]
        kinds = [0] * load.requests
        if not policy.holds(load.requests, load.waiting):
            policy.choose(
                load.requests,
                load.waiting,
                names,
                kinds,
            )
        drafted = policy.latest
        step = Step(
            load.requests,
            load.prompt,
            made,
            drafted,
        )
        if (
            pending
        ):  # the output of the step before arrives after this one is scheduled
            policy.observe(*pending)
        p = accepts(number, made.exit)
        emitted = []
        for _ in names:
            accepted = 0
            while accepted < made.drafts and rng.random() < p:
                accepted += 1
            emitted.append(1 + accepted)
        exact = engine.seconds(
            load.requests, load.prompt, made.drafts, drafted, load.context
        )
        seconds = exact * max(rng.gauss(1.0, noise), 0.5)
        served = None if load.idle else seconds
        pending = (step, served, names, kinds, emitted)
        if not policy.learns(step):
            pending = (step, served, [], [], [])
        made = drafted
        if number < skip:
            continue
        plain = engine.seconds(
            load.requests,
            0,
            0,
            NO_DRAFTS,
            load.context,
        )
        prompt = (
            engine.seconds(
                load.requests,
                load.prompt,
                0,
                NO_DRAFTS,
                load.context,
            )
            - plain
        )
        result.seconds += exact
        result.alone += plain * sum(emitted) / load.requests + prompt
        result.plans.append(drafted)
    return result
