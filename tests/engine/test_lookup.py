# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup before the method: what is found, which source drafts, and that the output stays the target's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import CASES, generate, greedy
from conftest import Factory, counting
from test_draft_length import MOST, Cost, Simulation, costs_of, predicted, shallow

from vllm_ppd.vllm_plugins.draft_length.controller import DraftLengthController
from vllm_ppd.vllm_plugins.drafting.prompt_lookup import KINDS, LONGEST_LOOKUP, PRIOR_WEIGHT, DraftSources, Lookup, find


def drafts_of(texts: list[list[int]], shortest: int, most: int = 3) -> list[list[int]]:
    token_ids = np.zeros((len(texts), 200), dtype=np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = text
    tokens, counts, _ = find(token_ids, np.array([len(text) for text in texts]), shortest, most)
    assert (tokens.dtype, tokens.shape) == (np.int64, (len(texts), most))
    return [ids[:count].tolist() for ids, count in zip(tokens, counts, strict=True)]


def test_what_followed_the_same_tokens_is_drafted() -> None:
    texts = [[5, 6, 7, 8, 9, 1, 5, 6], [5, 6, 7, 8, 9, 1, 4, 6], [3, 1, 3], [], [4]]
    assert drafts_of(texts, 2) == [[7, 8, 9], [], [], [], []]
    assert drafts_of(texts, 1) == [[7, 8, 9], [7, 8, 9], [1, 3], [], []]


def test_the_longest_agreement_counts() -> None:
    same = list(range(50, 50 + LONGEST_LOOKUP))
    text = [1, 2, 99, *same, 7, 8, 51, 81, 11, *same]
    assert drafts_of([text], 2) == [[7, 8, 51]]
    assert drafts_of([[80, 81, 3, *text]], LONGEST_LOOKUP) == [[7, 8, 51]]
    assert drafts_of([text[1:]], LONGEST_LOOKUP + 1) == [[]]


# ---- which source drafts


class Sources(Simulation):
    """Simulation with a lookup that has drafts now and then, with a probability and at a cost of its own."""

    def __init__(self, cost: Cost, lookup_cost: Cost, chance: float, right: float, **settings: Any) -> None:
        super().__init__(cost, **settings)
        self.lookup_cost, self.chance, self.right = lookup_cost, chance, right
        lookup = DraftLengthController(costs_of(lookup_cost), KINDS, PRIOR_WEIGHT)
        self.sources = DraftSources(1, MOST, self.controller, lookup)
        self.sources.find = self.find  # type: ignore[method-assign]
        self.looked_up, self.lookups = False, 0

    def find(self, *_: Any) -> Lookup:
        has = self.rng.random(self.requests) < self.chance
        return Lookup(np.zeros((self.requests, MOST), dtype=np.int64), np.where(has, MOST, 0), np.where(has, 5, 0))

    def run(self, steps: int, acceptance: float | list[float]) -> list[int]:
        most, sampled = [], np.zeros(self.requests, dtype=bool)
        names = [f"r{i}" for i in range(self.requests)]
        for _ in range(steps):
            cost, rate = (self.lookup_cost, self.right) if self.looked_up else (self.cost, acceptance)
            right = self.rng.random((self.requests, MOST)) < rate
            accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), self.drafts)
            self.tokens += int((1 + accepted).sum())
            self.seconds += cost(self.requests, int(self.drafts.max()))
            self.sources.observe(names, 1 + accepted)
            allowed = np.full(self.requests, MOST)
            self.drafts, tokens = self.sources.choose(None, allowed, allowed, self.requests, sampled)
            self.looked_up = tokens is not None
            self.lookups += self.looked_up
            most.append(int(self.drafts.max()))
        return most


def step(acceptance: float, share: float) -> tuple[float, float]:
    """Tokens and seconds of a step with the best number of drafts."""
    best = int(np.argmax(predicted(acceptance, share)))
    seconds = 1 + share * best
    return predicted(acceptance, share)[best] * seconds, seconds


@pytest.mark.parametrize(("chance", "right"), [(0.5, 0.8), (0.3, 0.9), (0.8, 0.7)])
def test_both_are_better_than_either(chance: float, right: float) -> None:
    """Lookups where there are any, the method elsewhere."""
    speeds = []
    for seed in range(4):
        engine = Sources(shallow(0.2), shallow(0.02), chance, right, seed=seed)
        engine.run(500, 0.6)
        speeds.append(engine.speed(3000, 0.6))
    mix = np.array([chance, 1 - chance])
    lookup, method, plain = step(right, 0.02), step(0.6, 0.2), (1.0, 1.0)
    lookups_alone, method_alone, both = (
        float(mix @ [here[0], there[0]] / (mix @ [here[1], there[1]]))
        for here, there in ((lookup, plain), (method, method), (lookup, method))
    )
    # What is accepted in four runs is not known to a per cent.
    assert np.mean(speeds) > max(0.95 * both, 0.985 * method_alone, 0.985 * lookups_alone)


def test_a_method_with_a_higher_expected_speed_up_drafts() -> None:
    engine = Sources(shallow(0.05), shallow(0.05), 0.9, 0.3)
    engine.run(500, 0.9)
    lookups, steps = engine.lookups, 2000
    assert engine.speed(steps, 0.9) > 0.93 * max(predicted(0.9, 0.05))
    assert engine.lookups - lookups < 0.05 * steps


@pytest.mark.parametrize("requests", [1, 8])
def test_neither_pays(requests: int) -> None:
    engine = Sources(shallow(0.4), shallow(0.3), 0.8, 0.05, requests=requests)
    assert engine.speed(3000, 0.05) > 0.96
    assert engine.speed(3000, 0.05) > 0.975


@pytest.mark.parametrize("requests", [1, 8])
def test_a_source_that_does_not_pay_leaves_the_other_alone(requests: int) -> None:
    engine = Sources(shallow(1.5), shallow(0.02), 0.9, 0.8, requests=requests)
    engine.run(500, 0.1)
    share = 0.9 if requests == 1 else 1.0
    assert engine.speed(3000, 0.1) > 0.9 * (1 + share * (max(predicted(0.8, 0.02)) - 1) * 0.9)
    engine = Sources(shallow(0.2), shallow(1.5), 0.9, 0.1, requests=requests)
    engine.run(500, 0.8)
    assert engine.speed(3000, 0.8) > 0.94 * max(predicted(0.8, 0.2))


def test_without_measurements_every_request_must_have_a_match() -> None:
    sources = DraftSources(1, MOST, None)
    batch = SimpleNamespace(lengths=np.array([5, 4]), token_ids=np.array([[1, 2, 3, 1, 2]] * 2))
    most, no = np.array([MOST, MOST]), np.zeros(2, dtype=bool)
    for ends, expected in (([5, 4], True), ([5, 3], False), ([3, 3], False)):
        batch.lengths = np.array(ends)
        drafts, tokens = sources.choose(batch, most, most, 2, no)
        assert (tokens is not None) is expected
        assert drafts.tolist() == ([3, 3] if expected else most.tolist())


def test_agreements_of_different_lengths_are_known_apart() -> None:
    """What agrees in one token is wrong here, what agrees in ten is right."""
    method = DraftLengthController(costs_of(shallow(0.2)))
    sources = DraftSources(1, MOST, method, DraftLengthController(costs_of(shallow(0.2)), KINDS, PRIOR_WEIGHT))
    rng, lengths, drafts = np.random.default_rng(0), 0, np.zeros(1, dtype=np.int64)
    chosen: tuple[list[int], list[int]] = [], []
    no = np.zeros(1, dtype=bool)
    for _ in range(3000):
        sources.observe(["r"], 1 + (drafts if lengths == 10 else 0 * drafts))
        lengths = int(rng.choice([1, 10]))
        match = Lookup(np.zeros((1, MOST), dtype=np.int64), np.array([MOST]), np.array([lengths]))
        sources.find = lambda *_, match=match: match  # type: ignore[method-assign]
        drafts, _ = sources.choose(None, np.array([MOST]), np.array([0]), 1, no)
        chosen[lengths == 10].append(int(drafts[0]))
    assert np.mean(chosen[0][-500:]) < 0.2 and np.mean(chosen[1][-500:]) > 3.5


# ---- engines


OPTIONS = {"method": "ppd", "prompt_lookup_min": 1}


@pytest.mark.engine
def test_lookups_are_drafted_and_accepted(engine: Factory) -> None:
    """The exactness suite would pass without them; a loop is found after its first turn."""
    llm, params = engine(OPTIONS), greedy(40)
    loop = {"prompt_token_ids": [9, 8, 7, 6, 5, 4] * 8}
    with counting(llm) as seen:
        generate(llm, [loop], params)
    assert seen["lookup_steps"] > 0 and seen["accepted"] > 0


@pytest.mark.engine
@pytest.mark.parametrize("adaptive", [False, True])
def test_same_tokens_with_lookups(engine: Factory, adaptive: bool) -> None:
    case = CASES["more_than_fit"]
    assert case(engine({**OPTIONS, "adaptive": adaptive})) == case(engine())
