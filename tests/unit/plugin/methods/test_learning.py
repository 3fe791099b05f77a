# SPDX-License-Identifier: Apache-2.0
"""Positions that are kept, solutions of them, and the scheduler's orders."""

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from learned import SMALL, learn_from_few
from torch import Tensor

from vllm_ppd.heads.training.ridge import Ridge
from vllm_ppd.vllm_plugins.draft_length import learning as module
from vllm_ppd.vllm_plugins.draft_length.learning import (
    Learning,
    Orders,
    Report,
)
from vllm_ppd.vllm_plugins.methods.learning.learner import (
    Learner,
    solve_in_slices,
)
from vllm_ppd.vllm_plugins.methods.learning.pairs import Pairs, Positions

D = 16
K = 3
VOCAB = 50
BLOCK = SMALL["BLOCK"]
HELD = SMALL["HELD"]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    learn_from_few(monkeypatch)


def target_of(table: Tensor) -> Any:
    return SimpleNamespace(
        hidden_size=table.shape[1],
        vocab_size=len(table),
        dtype=torch.float32,
        device=torch.device("cpu"),
        embed=lambda tokens: table[tokens],
    )


@pytest.mark.parametrize("size", [5, 48, 130])
def test_slices_solve(size: int) -> None:
    torch.manual_seed(size)
    rows = torch.randn(2 * size, size)
    matrix = rows.T @ rows + torch.eye(size)
    values = torch.randn(size, 7)
    expected = torch.linalg.solve(matrix.double(), values.double())
    slices = list(solve_in_slices(matrix, values, 48))
    assert len(slices) == 2 * -(-size // 48)
    torch.testing.assert_close(
        values.double(),
        expected,
        rtol=1e-3,
        atol=1e-4,
    )


@dataclass
class Request:
    """A request with a row."""

    name: int
    text: list[int]
    run: int = 0  # positions
    # First positions of answers, since it was admitted and resumed
    begun: list[int] = field(default_factory=list)

    @property
    def learned(self) -> bool:
        return self.name % 5 > 0


class Traffic:
    """Requests whose states tell their names and positions, in steps as vLLM's runner
    has them: prompts in chunks, drafts that are rejected, preemptions.
    """

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.texts = torch.zeros(
            4,
            400,
            dtype=torch.int32,
        )
        self.lengths = torch.zeros(4, dtype=torch.int32)
        states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self.texts),
            total_len=SimpleNamespace(gpu=self.lengths),
        )
        # Of more rows, so that the ring holds all that comes
        self.pairs = Pairs(
            64,
            K,
            states,
            target_of(torch.zeros(VOCAB, D)),
        )
        self.live: dict[int, Request] = {}

    def tokens(self, count: int) -> list[int]:
        return list(
            self.random.integers(
                1,
                VOCAB,
                count,
            ).tolist()
        )

    def admit(self, row: int, request: Request) -> None:
        """Give a new or resumed request a row."""
        known = len(request.text)
        request.run = 0
        request.begun.append(known - 1)
        self.live[row] = request
        self.write(row)
        self.pairs.add_request(
            row, str(request.name), known if request.learned else None
        )

    def write(self, row: int) -> None:
        text = self.live[row].text
        self.texts[row, : len(text)] = torch.tensor(text)
        self.lengths[row] = len(text)

    def step(self) -> None:
        """One step of every live request."""
        scheduled = []
        emitted = []
        rejected = []
        places = []
        states = []
        for request in self.live.values():
            left = len(request.text) - request.run
            drafts = int(self.random.integers(0, K + 1))
            right = int(self.random.integers(0, drafts + 1))
            if left > 1:  # a prompt
                drafts = right = 0
            tokens = min(left, 5) + drafts
            ends = request.run + tokens >= len(request.text)
            scheduled.append(tokens)
            emitted.append(1 + right if ends else 0)
            rejected.append(drafts - right)
            first = request.name * 1000 + request.run
            places.append(torch.arange(first, first + tokens))
            state = places[-1].float()
            state[tokens - rejected[-1] :] = -1
            states.append(state[:, None].expand(-1, D))
        batch = SimpleNamespace(
            idx_mapping=torch.tensor(list(self.live)),
            query_start_loc=torch.tensor([0, *itertools.accumulate(scheduled)]),
            positions=torch.cat(places) % 1000,
        )
        counts = torch.tensor([emitted, rejected])
        self.pairs.record(batch, torch.cat(states), *counts)
        for number, (row, request) in enumerate(self.live.items()):
            request.run += scheduled[number] - rejected[number]
            request.text += self.tokens(emitted[number])
            self.write(row)


def test_positions_are_those_of_answers() -> None:
    """Prompts, rejected drafts, requests that opted out, and what a preemption cuts
    are left out; all else is there, once.
    """
    traffic = Traffic()
    requests: dict[int, Request] = {}
    for step in range(220):
        for row in set(range(4)) - set(traffic.live):
            if len(requests) < 12:
                name = len(requests) + 1
                requests[name] = Request(name, traffic.tokens(3 + 4 * row))
                traffic.admit(row, requests[name])
        if not traffic.live:
            break
        traffic.step()
        for row, request in list(traffic.live.items()):
            if len(request.text) > 60:
                del traffic.live[row]
            elif step % 37 == 36 and row == 1:
                traffic.admit(row, request)
    seen, held = traffic.pairs.counts.seen.tolist()
    assert 64 < seen < traffic.pairs.size
    assert held == HELD
    expected = set()
    for request in filter(lambda request: request.learned, requests.values()):
        ends = [*request.begun[1:], len(request.text) - 1]
        for start, end in zip(
            request.begun,
            ends,
            strict=True,
        ):
            places = range(start, end - K - 1)
            expected |= {1000 * request.name + place for place in places}
    parts = [(0, seen), (traffic.pairs.size, held)]
    found: list[set[int]] = []
    for part in itertools.starmap(traffic.pairs.part, parts):
        assert part.states.eq(part.states[..., :1]).all()
        first, following = part.states[..., 0].long().unbind(1)
        assert following.equal(first + 1)
        found.append(set(first.tolist()))
        for place, tokens in zip(
            first.tolist(),
            part.tokens,
            strict=True,
        ):
            name, position = divmod(place, 1000)
            after = requests[name].text[position + 1 : position + K + 2]
            assert tokens.tolist() == after
    assert sum(map(len, found)) == seen + held
    both = set.union(*found)
    assert len(both) == seen + held
    # Some were not complete when their request ended
    assert both <= expected
    assert len(both) > 0.9 * len(expected)
    # Only requests that ran when enough was held out are in both
    learned, held_out = ({place // 1000 for place in part} for part in found)
    assert len(learned & held_out) <= 4 < len(learned | held_out)


def drafting(table: Tensor) -> Any:
    """A drafter whose vocabulary is all tokens."""
    vocabulary = SimpleNamespace(
        choose=lambda counts: None,
        logits=lambda states: states @ table.T,
        ids=lambda entries: entries,
    )
    return SimpleNamespace(factors=K, vocabulary=vocabulary)


def answers(table: Tensor, count: int) -> Positions:
    """Positions of a target whose next state is linear in the normed state and token,
    and whose tokens are the best ones.
    """
    torch.manual_seed(1)
    of_state = torch.randn(D, D) / D**0.5
    of_token = torch.randn(D, D) / D**0.5
    norm = torch.nn.functional.rms_norm
    state = torch.randn(count, D)
    states, tokens = [], []
    for _ in range(K + 2):
        states.append(state)
        tokens.append((state @ table.T).argmax(1))
        embedded = norm(
            table[tokens[-1]],
            [D],
            eps=1e-6,
        )
        change = (
            norm(
                state,
                [D],
                eps=1e-6,
            )
            @ of_state
            + embedded @ of_token
        )
        state = state + change
    return Positions(
        torch.stack(states[:2], dim=1), torch.stack(tokens[: K + 1], dim=1)
    )


def test_a_linear_target_is_learned() -> None:
    """By the ridge regression with which heads start to train, a slice at a time."""
    torch.manual_seed(0)
    table = torch.randn(VOCAB, D)
    target = target_of(table)
    everything = answers(table, HELD + 32 * BLOCK)
    held, rest = (
        Positions(*parts)
        for parts in zip(
            *(part.tensor_split([HELD]) for part in everything), strict=True
        )
    )
    blocks = [
        Positions(*parts)
        for parts in zip(*(part.split(BLOCK) for part in rest), strict=True)
    ]
    learner = Learner(
        drafting(table),
        target,
        held,
        layers=4,
    )
    for block in blocks:
        learner.use(block)
    spoiled = torch.full_like(blocks[0].states[:1], torch.nan)
    learner.use(Positions(spoiled, blocks[0].tokens[:1]))
    list(learner.solve())
    ridge = Ridge(D)
    for block in blocks:
        read = learner._inputs(block.states[:, 0], block.tokens[:, 0])
        ridge.add(read, block.states[:, 1] - block.states[:, 0])
    expected, _ = ridge.solve()
    drift = (learner.solution.double() - expected).norm() / expected.norm()
    assert drift < 0.05
    solutions, accepted, gained, squares = learner.result.seen.tolist()
    assert solutions == 1 and accepted == gained
    assert accepted > 0.9 * K * HELD and squares <= K * gained
    learner._in_use.copy_(learner._accepted)
    list(learner.solve())
    assert learner.result.seen.tolist() == [2, accepted, 0, 0]


def test_orders() -> None:
    """Blocks once, the latest; solutions at the marks; an end after the last; all anew
    with new weights.
    """
    learning = Learning(32)  # solutions from 128 positions and from 256
    better = {"accepted": 90, "gained": 90, "squares": 90}
    reports = [
        (Report(), Orders(0)),
        (Report(seen=3 * BLOCK + 5), Orders(0, 2)),
        (Report(seen=3 * BLOCK + 6), Orders(0)),
        (Report(seen=4 * BLOCK), Orders(0, 3)),
        (Report(seen=4 * BLOCK, held=HELD), Orders(0, solve=True)),
        (Report(seen=6 * BLOCK, held=HELD), Orders(0, 5)),
        (
            Report(0, 7 * BLOCK, HELD, 1, **better),
            Orders(
                0,
                6,
                solve=True,
                install=True,
            ),
        ),
        (Report(0, 7 * BLOCK, HELD, 1, **better), Orders(0)),
        (
            Report(
                0,
                7 * BLOCK,
                HELD,
                2,
            ),
            Orders(0, end=True),
        ),
        (
            Report(
                0,
                8 * BLOCK,
                HELD,
                2,
            ),
            None,
        ),
        (Report(1), Orders(1)),
    ]
    for report, orders in reports:
        learning.observe(report)
        assert learning.orders() == orders
        assert learning.installed == (report.solutions > 0)


@pytest.mark.parametrize("installed", [False, True])
def test_learning_ends_after_two_solutions_without_a_sure_gain(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """Better ones take the place of heads in use."""
    monkeypatch.setattr(module, "MARKS", (1, 2, 3))
    learning = Learning(BLOCK)
    learning.installed = installed
    learning.observe(Report(0, BLOCK, HELD))
    assert learning.orders() == Orders(0, 0, solve=True)
    second = Report(0, 2 * BLOCK, HELD, 1, gained=15, squares=HELD)
    learning.observe(second)
    assert learning.orders() == Orders(0, 1, True, installed)
    learning.observe(second._replace(solutions=2))
    assert learning.orders() == Orders(0, None, False, installed, True)


def test_a_gain_is_beyond_the_interval() -> None:
    assert not Report(gained=15, squares=HELD).gains()
    assert Report(gained=60, squares=HELD).gains()
    assert not Report(gained=-60, squares=HELD).gains()
