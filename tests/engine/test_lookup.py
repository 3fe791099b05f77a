# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup beside the method: what is found, which source drafts, and that the output stays the target's."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import CASES, generate, greedy, prompts
from conftest import Factory, counting
from test_draft_length import MOST, Cost, Simulation, costs_of, predicted, shallow

from vllm_ppd.vllm_plugins.draft_length.controller import KINDS, Acceptance, DraftLengthController
from vllm_ppd.vllm_plugins.drafting import prompt_lookup
from vllm_ppd.vllm_plugins.drafting.prompt_lookup import ALL_KINDS, LONGEST_LOOKUP, DraftSources, Lookup, find


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
        self.lookup_cost, self.chance, self.right, self.lengths = lookup_cost, chance, right, [5]
        self.controller = DraftLengthController(costs_of(cost), ALL_KINDS, lookups=costs_of(lookup_cost))
        self.sources = DraftSources(1, MOST)
        self.looked_up, self.lookups = np.zeros(self.requests, dtype=bool), 0

    def find(self, *_: Any) -> Lookup:
        has = self.rng.random(self.requests) < self.chance
        lengths = np.where(has, self.rng.choice(self.lengths, self.requests), 0)
        return Lookup(np.zeros((self.requests, MOST), dtype=np.int64), np.where(has, MOST, 0), lengths)

    def run(self, steps: int, acceptance: float | list[float]) -> list[int]:
        most, sampled = [], np.zeros(self.requests, dtype=bool)
        names, allowed = [f"r{i}" for i in range(self.requests)], np.full(self.requests, MOST)
        batch = SimpleNamespace(lengths=allowed, token_ids=None)
        for _ in range(steps):
            rate = np.where(self.looked_up[:, None], self.right, acceptance)
            right = self.rng.random((self.requests, MOST)) < rate
            accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), self.drafts)
            self.tokens += int((1 + accepted).sum())
            cost = self.cost if self.drafts[~self.looked_up].any() else self.lookup_cost
            self.seconds += cost(self.requests, int(self.drafts.max()))
            self.controller.observe(names, 1 + accepted)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(prompt_lookup, "find", self.find)
                found, drafts, kinds = self.sources.choose(batch, allowed, allowed, sampled, self.controller.acceptance)
            self.drafts, self.looked_up = self.controller.choose(drafts, self.requests, kinds), found.counts > 0
            self.lookups += int((self.drafts[self.looked_up] > 0).any())
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


def test_requests_of_a_step_take_drafts_of_either_source() -> None:
    """Each takes its match, and the others keep the method's drafts: more tokens than a step of either source has."""
    engine = Sources(shallow(0.02), shallow(0.02), 0.5, 0.9, requests=8)
    engine.run(500, 0.6)
    speed = engine.speed(2000, 0.6)
    both = [np.mean([predicted(0.9, 0.02), predicted(0.6, 0.02)], axis=0)[n] for n in range(MOST + 1)]
    assert speed > 0.97 * max(both) > 1.1 * max(predicted(0.6, 0.02))


def test_a_method_whose_drafts_are_accepted_more_often_drafts() -> None:
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
    assert engine.speed(3000, 0.1) > 0.9 * (1 + 0.9 * (max(predicted(0.8, 0.02)) - 1) * 0.9)
    engine = Sources(shallow(0.2), shallow(1.5), 0.9, 0.1, requests=requests)
    engine.run(500, 0.8)
    assert engine.speed(3000, 0.8) > 0.94 * max(predicted(0.8, 0.2))


def test_without_measurements_every_match_is_taken() -> None:
    batch = SimpleNamespace(lengths=np.array([5, 3]), token_ids=np.array([[1, 2, 3, 1, 2]] * 2))
    most, no = np.array([MOST, MOST]), np.zeros(2, dtype=bool)
    found, drafts, kinds = DraftSources(1, MOST).choose(batch, most, most, no, None)
    assert found.counts.tolist() == [3, 0] and drafts.tolist() == [3, MOST]
    assert kinds[0] >= KINDS > kinds[1]


def test_agreements_of_different_lengths_are_known_apart() -> None:
    """What agrees in one token is wrong here, what agrees in eighteen is right."""
    rng, acceptance = np.random.default_rng(0), Acceptance(MOST, ALL_KINDS)
    acceptance.align(["r"])
    batch, sources = SimpleNamespace(lengths=np.array([40])), DraftSources(1, MOST)
    apart, again, one = [*range(40)], [*range(100, 118), 1, *range(100, 118)], np.array([1])
    taken: dict[bool, list[bool]] = {False: [], True: []}
    for _ in range(1000):
        right = bool(rng.integers(2))
        text = [0] * (39 - len(again) + 1) + again if right else [*apart[:39], 5]
        batch.token_ids = np.array([text[-40:]])
        found, _, acceptance.kinds = sources.choose(batch, one, one, np.zeros(1, dtype=bool), acceptance)
        by_lookup = bool(found.counts[0])
        taken[right].append(by_lookup)
        acceptance.learn(one, np.array([right if by_lookup else rng.random() < 0.5], dtype=np.int64))
    assert np.mean(taken[False][-200:]) < 0.05 and np.mean(taken[True][-200:]) > 0.95


# ---- engines


OPTIONS = {
    "alone": {"method": "lookup", "prompt_lookup_min": 1},
    "early": {"method": "ppd", "exit_layer": 3, "prompt_lookup_min": 1},
}


@pytest.mark.engine
@pytest.mark.parametrize("name", OPTIONS)
def test_lookups_are_drafted_and_accepted(engine: Factory, name: str) -> None:
    """The exactness suite would pass without them; a loop is found after its first turn."""
    llm, params = engine(OPTIONS[name]), greedy(40)
    loop = {"prompt_token_ids": [9, 8, 7, 6, 5, 4] * 8}
    with counting(llm) as seen:
        generate(llm, [loop, *prompts(2)], params)
    assert seen["lookup_steps"] > 0 and seen["accepted"] > 0


@pytest.mark.engine
def test_steps_without_a_match_are_counted(engine: Factory) -> None:
    """Also where a few tokens agree, but fewer than the shortest match."""
    llm = engine({"method": "lookup", "prompt_lookup_min": 8})
    with counting(llm) as seen:
        generate(llm, prompts(2), greedy(12))
    assert seen["drafting_off_steps/no_match"] > 5 and not seen["drafting_off_steps/cost"]


@pytest.mark.engine
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_same_tokens_with_lookups(engine: Factory, name: str, adaptive: bool) -> None:
    case = CASES["more_than_fit"]
    assert case(engine({**OPTIONS[name], "adaptive": adaptive})) == case(engine())
