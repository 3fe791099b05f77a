# SPDX-License-Identifier: Apache-2.0
"""Positions that are kept, solutions of them, and the scheduler's orders."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from learned import SMALL, learn_from_few
from torch import Tensor

from vllm_ppd.heads.cp.recipe import ridge
from vllm_ppd.vllm_plugins.draft_length.learning import Learning, Report
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
    slices = list(solve_in_slices(matrix, values))
    assert len(slices) == 2 * -(-size // int(SMALL["PANEL"]))
    torch.testing.assert_close(values.double(), expected, rtol=1e-3, atol=1e-4)


class Traffic:
    """Requests whose states tell their names and positions, in steps as vLLM's runner
    has them: prompts in chunks, drafts that are rejected, preemptions.
    """

    rows = 4

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.texts = torch.zeros(self.rows, 400, dtype=torch.int32)
        self.lengths = torch.zeros(self.rows, dtype=torch.int32)
        states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self.texts),
            total_len=SimpleNamespace(gpu=self.lengths),
        )
        # Of more rows, so that the ring holds all that comes
        self.pairs = Pairs(64, K, states, target_of(torch.zeros(VOCAB, D)))
        # row -> [name, text, positions that have run, first answer's state, learned]
        self.live: dict[int, list[Any]] = {}
        self.ended: list[list[Any]] = []

    def token(self) -> int:
        return int(self.random.integers(1, VOCAB))

    def admit(self, row: int, request: list[Any]) -> None:
        """Give a new or resumed request a row."""
        _, text, _, _, learned = request
        request[2] = 0
        request[3].append(len(text) - 1)
        self.live[row] = request
        self.texts[row, : len(text)] = torch.tensor(text)
        self.lengths[row] = len(text)
        known = len(text) if learned else None
        self.pairs.add_request(row, str(request[0]), known)

    def step(self) -> None:
        """One step of every live request."""
        rows, starts, positions, states, sampled, rejected = (
            [],
            [0],
            [],
            [],
            [],
            [],
        )
        for row, (name, text, done, _, _) in self.live.items():
            drafts = int(self.random.integers(0, K + 1))
            prompt = len(text) - done > 1
            chunk = min(len(text) - done, 5) if prompt else 1 + drafts
            right = 0 if prompt else int(self.random.integers(0, drafts + 1))
            ends = done + chunk >= len(text)
            rows.append(row)
            starts.append(starts[-1] + chunk)
            positions += range(done, done + chunk)
            sampled.append(1 + right if ends else 0)
            rejected.append(0 if prompt else drafts - right)
            kept = chunk - rejected[-1]
            states += [
                name * 1000 + done + i if i < kept else -1 for i in range(chunk)
            ]
        batch = SimpleNamespace(
            idx_mapping=torch.tensor(rows, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            positions=torch.tensor(positions),
        )
        hidden = torch.tensor(states).float()[:, None].expand(-1, D)
        counts = torch.tensor([sampled, rejected], dtype=torch.int32)
        self.pairs.record(batch, hidden, counts[0], counts[1])
        for place, row in enumerate(rows):
            request = self.live[row]
            emitted = [self.token() for _ in range(sampled[place])]
            request[2] += starts[place + 1] - starts[place] - rejected[place]
            request[1] += emitted
            end = len(request[1])
            self.texts[row, end - len(emitted) : end] = torch.tensor(emitted)
            self.lengths[row] = end

    def entries(self) -> Iterator[tuple[bool, int, int, list[int], float]]:
        """(Held out, request, position, tokens, state of the next) of each."""
        seen, held = self.pairs.counts.seen.tolist()
        parts = [
            self.pairs.part(0, min(seen, self.pairs.size)),
            self.pairs.part(self.pairs.size, held),
        ]
        for is_held, part in enumerate(parts):
            for states, tokens in zip(*part, strict=True):
                first, following = states[:, 0].long().tolist()
                name, position = divmod(first, 1000)
                assert states.eq(states[:, :1]).all()
                yield bool(is_held), name, position, tokens.tolist(), following


def test_positions_are_those_of_answers() -> None:
    """Prompts, rejected drafts, requests that opted out, and what a preemption cuts
    are left out; all else is there, once.
    """
    traffic = Traffic()
    requests: dict[int, list[Any]] = {}
    for step in range(220):
        for row in range(traffic.rows):
            if row not in traffic.live and len(requests) < 12:
                name = len(requests) + 1
                text = [traffic.token() for _ in range(3 + 4 * row)]
                requests[name] = [name, text, 0, [], name % 5 > 0]
                traffic.admit(row, requests[name])
        if not traffic.live:
            break
        traffic.step()
        for row, request in list(traffic.live.items()):
            if len(request[1]) > 60:
                del traffic.live[row]
            elif step % 37 == 36 and row == 1:
                traffic.admit(row, request)
    seen, held = traffic.pairs.counts.seen.tolist()
    assert 64 < seen < traffic.pairs.size and held == HELD
    expected = set()
    for name, text, _, begun, learned in requests.values():
        bounds = [*begun, 10**6]
        for start, end in itertools.pairwise(bounds):
            last = min(end, len(text) - 1) - K - 1
            if learned:
                expected |= {(name, at) for at in range(start, last)}
    found = []
    by_part: dict[bool, set[int]] = {False: set(), True: set()}
    for is_held, name, position, tokens, following in traffic.entries():
        found.append((name, position))
        by_part[is_held].add(name)
        text = requests[name][1]
        assert tokens == text[position + 1 : position + K + 2]
        assert following == name * 1000 + position + 1
    assert len(found) == len(set(found)) == seen + held
    missing = expected - set(found)
    assert set(found) <= expected and len(missing) < 0.1 * len(expected)
    # One request was met when enough was held out
    assert len(by_part[False] & by_part[True]) <= 1


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
        embedded = norm(table[tokens[-1]], [D], eps=1e-6)
        change = norm(state, [D], eps=1e-6) @ of_state + embedded @ of_token
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
    held, *blocks = (
        Positions(*(part[start:end] for part in everything))
        for start, end in [
            (0, HELD),
            *((HELD + i * BLOCK, HELD + (i + 1) * BLOCK) for i in range(32)),
        ]
    )
    learner = Learner(drafting(table), target, held)
    for block in blocks:
        learner.use(block)
    slices = list(learner.solve())
    assert len(slices) > HELD / int(SMALL["ROWS"])
    inputs = []
    for block in blocks:
        read = learner._inputs(block.states[:, 0], block.tokens[:, 0])
        inputs.append((read, block.states[:, 1] - block.states[:, 0]))
    expected, _ = ridge(inputs, D)
    assert learner.solution.corrcoef().isfinite().all()
    drift = (learner.solution.double() - expected).norm() / expected.norm()
    assert drift < 0.05
    solutions, accepted, gained, squares = learner.result.seen.tolist()
    assert solutions == 1 and accepted == gained
    assert accepted > 0.9 * K * HELD and squares <= K * gained
    report = Report(0, 0, HELD, *learner.result.seen.tolist())
    assert report.gains()
    learner._in_use.copy_(learner._accepted)
    list(learner.solve())
    again = Report(0, 0, HELD, *learner.result.seen.tolist())
    assert again.solutions == 2 and again.gained == 0 and not again.gains()


def test_orders() -> None:
    """Blocks once, the latest; solutions at the marks; an end after two without gain,
    or the last; all anew with new weights.
    """
    learning = Learning(32)  # solutions from 128 positions and from 256
    first = learning.orders()
    assert first is not None and not any(first[2:]) and first.block is None
    learning.observe(Report(seen=3 * BLOCK + 5))
    orders = [learning.orders() for _ in range(2)]
    assert [o.block for o in orders if o is not None] == [2, None]
    learning.observe(Report(seen=4 * BLOCK, held=HELD))
    order = learning.orders()
    assert order is not None and order.block == 3 and order.solve
    assert learning.orders() == (0, None, False, False, False)
    learning.observe(Report(0, 4 * BLOCK, HELD, 1, 90, 90, 90))
    order = learning.orders()
    assert order is not None and order.install and learning.installed
    learning.observe(Report(0, 6 * BLOCK, HELD, 1, 90, 90, 90))
    learning.orders()
    learning.observe(Report(0, 7 * BLOCK, HELD, 1, 90, 90, 90))
    order = learning.orders()
    assert order is not None and order.solve and not order.end
    learning.observe(Report(0, 7 * BLOCK, HELD, 2, 80, -10, 10))
    order = learning.orders()
    assert order is not None and order.end and not order.install
    assert learning.installed and learning.orders() is None
    learning.observe(Report(1))
    assert not learning.installed
    assert learning.orders() == (1, None, False, False, False)


def test_a_gain_is_beyond_the_interval() -> None:
    assert not Report(gained=15, squares=HELD).gains()
    assert Report(gained=60, squares=HELD).gains()
    assert not Report(gained=-60, squares=HELD).gains()
