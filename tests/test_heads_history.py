# SPDX-License-Identifier: Apache-2.0
"""Who may draft with DynaMo's heads after they have rested: vLLM's own KV blocks against a slot-by-slot account."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from vllm_ppd.vllm_plugins.heads_backlog import HeadsBacklog
from vllm_ppd.vllm_plugins.heads_history import HeadsHistory

BLOCK = 4  # tokens
LAYERS = 6
CUT_OFF = 2
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=10)


def layers(*numbers: int) -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in numbers]


class Server:
    """vLLM's KV cache manager and what its runner keeps of a batch; counts which slots hold the heads' KV.

    A request is computed by step(), which takes {request id: (tokens scheduled, tokens that count)}.
    """

    def __init__(self, groups: list[KVCacheGroupSpec], num_blocks: int) -> None:
        init_none_hash(sha256)
        self.kv_cache_config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(self.kv_cache_config, max_model_len=96, scheduler_block_size=BLOCK,
                                      hash_block_size=BLOCK)  # fmt: skip
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.requests: dict[str, Request] = {}
        self.blocks: dict[str, list[list[int]]] = {}  # as the runner has them: those behind a window stay
        self.held = np.zeros((num_blocks, BLOCK), dtype=bool)
        self.heads = [gid for gid, group in enumerate(groups) if set(group.layer_names) & set(layers(6, 7))]
        self.backlog = HeadsBacklog(24, 1, torch.float32, torch.device("cpu"), has_residual=True)
        self.history = HeadsHistory(self, LAYERS, CUT_OFF, self.backlog)

    def add(self, name: str, tokens: list[int]) -> None:
        params = SamplingParams(max_tokens=90)
        self.requests[name] = Request(name, tokens, params, None, block_hasher=self.hasher)

    def end(self, name: str) -> None:
        self.preempt(name)
        del self.requests[name]

    def preempt(self, name: str) -> None:
        self.manager.free(self.requests[name])
        self.requests[name].num_computed_tokens = 0
        self.history.forget([name])
        self.blocks.pop(name, None)

    def allocate(self, name: str, scheduled: int) -> int | None:
        """Give a request its blocks; returns the tokens that it may compute, None if there is no room."""
        request, hit, cached = self.requests[name], 0, None
        new = name not in self.blocks
        if new:
            cached, hit, _ = self.manager.get_computed_blocks(request)
        scheduled = min(scheduled, request.num_tokens - hit) if new else scheduled
        given = self.manager.allocate_slots(request, scheduled, hit, cached, num_lookahead_tokens=0)
        if given is None:
            return None
        if new:
            self.blocks[name] = [list(ids) for ids in self.manager.get_block_ids(name)]
            request.num_computed_tokens = hit
        else:
            for ids, more in zip(self.blocks[name], given.get_block_ids(), strict=True):
                ids.extend(more)
        return scheduled

    def step(
        self, plan: dict[str, tuple[int, int]], paused: bool = False, drafting: tuple[str, ...] = (),
        keeps: bool = True,
    ) -> tuple[bool, dict[str, bool]]:  # fmt: skip
        """Run a step, of a pause in drafting or not: (whether the heads rested, which requests may draft after it).

        Those of `drafting` that may then do, and catch up first; what a token's state is says its position.
        """
        scheduled = {name: self.allocate(name, count) for name, (count, _) in plan.items()}
        names = [name for name, count in scheduled.items() if count is not None]
        if not names:
            return False, {}
        lengths = np.array([scheduled[name] for name in names])
        starts = np.array([self.requests[name].num_computed_tokens for name in names], dtype=np.int32)
        starting = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.query_start_loc = SimpleNamespace(np=starting, gpu=torch.from_numpy(starting))
        tables = []
        for gid in range(len(self.kv_cache_config.kv_cache_groups)):
            table = np.zeros((len(names), 32), dtype=np.int32)
            for row, name in enumerate(names):
                table[row, : len(self.blocks[name][gid])] = self.blocks[name][gid]
            tables.append(SimpleNamespace(get_numpy_array=lambda table=table: table, block_size=BLOCK))
        requests = [self.requests[name] for name in names]
        self.input_batch = SimpleNamespace(
            num_reqs=len(names),
            req_ids=names,
            num_computed_tokens_cpu=starts,
            num_prompt_tokens=np.array([request.num_prompt_tokens for request in requests], dtype=np.int32),
            num_tokens_no_spec=np.array([request.num_tokens for request in requests], dtype=np.int32),
            block_table=tables,
        )
        self.run(names, starts, lengths, heads=True)
        expected = [len(names) <= CUT_OFF and self.holds_past(name) for name in names]
        decoding = all(
            request.num_output_tokens > 0 and start == request.num_tokens - 1
            for request, start in zip(requests, starts.tolist(), strict=True)
        )
        rests = self.history.begin_step(paused, keeps)
        assert rests == (decoding and ((paused and lengths.max() == 1) or not any(expected)))
        expected = [one and not rests for one in expected]
        if self.history.known is not None:
            assert self.history.known.tolist() == expected
        self.run(names, starts, lengths, heads=not rests)
        places = torch.from_numpy(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]))
        state = places.float()[:, None]
        self.history.keep((state, -state))
        able = np.ones(len(names), dtype=bool) if self.history.able is None else self.history.able
        may = dict(zip(names, able.tolist(), strict=True))
        if not keeps:
            assert able.tolist() == expected
        assert not any(one and not can for one, can in zip(expected, able, strict=True))
        missed = self.history.catch_up(
            np.array([i for i, one in enumerate(names) if one in drafting and may[one]], int)
        )
        if missed is not None:
            assert missed.state[0][:, 0].tolist() == missed.positions.tolist()
            assert missed.state[1] is not None and (missed.state[1] == -missed.state[0]).all()
            for gid in self.heads:
                for row, place in zip(missed.rows, missed.positions, strict=True):
                    self.held[self.blocks[names[row]][gid][place // BLOCK], place % BLOCK] = True
            assert all(self.holds_past(names[row], 1) for row in missed.rows)
        for name, length in zip(names, lengths, strict=True):
            request = self.requests[name]
            request.num_computed_tokens += min(int(length), plan[name][1])
            if request.num_computed_tokens >= request.num_tokens:
                request.append_output_token_ids([7] * (request.num_computed_tokens + 1 - request.num_tokens))
        return rests, may

    def run(self, names: list[str], starts: np.ndarray, lengths: np.ndarray, heads: bool) -> None:
        """Write the KV of a step, in the heads' layers or not."""
        for name, start, length in zip(names, starts, lengths, strict=True):
            places = np.arange(start, start + length)
            for gid in self.heads:
                self.held[np.array(self.blocks[name][gid])[places // BLOCK], places % BLOCK] = heads

    def holds_past(self, name: str, further: int = 0) -> bool:
        """Whether every slot that the request's next token, or a further one, attends to, to the block, holds KV."""
        end = self.requests[name].num_computed_tokens + further
        for gid in self.heads:
            window = getattr(self.kv_cache_config.kv_cache_groups[gid].kv_cache_spec, "sliding_window", None)
            first = 0 if window is None else max(0, end + 1 - window) // BLOCK * BLOCK
            places = np.arange(first, end)
            blocks = np.array(self.blocks[name][gid], dtype=np.int64)
            if not self.held[blocks[places // BLOCK], places % BLOCK].all():
                return False
        return True


def one_group() -> list[KVCacheGroupSpec]:
    return [KVCacheGroupSpec(layers(*range(8)), FULL)]


def tokens(seed: int, count: int) -> list[int]:
    return [1000 * (seed + 1) + i for i in range(count)]


@pytest.fixture
def crowd() -> Server:
    """Three requests of 10 tokens that have emitted 4 more together; the heads rested when they took in 3 of these."""
    server = Server(one_group(), 40)
    for i in range(3):
        server.add(f"r{i}", tokens(i, 10))
    server.step({f"r{i}": (10, 10) for i in range(3)})
    for _ in range(3):
        assert server.step({f"r{i}": (1, 1) for i in range(3)}) == (True, {"r0": False, "r1": False, "r2": False})
    return server


def test_nothing_is_looked_at_before_a_step_has_rested() -> None:
    server = Server(one_group(), 40)
    for i in range(3):
        server.add(f"r{i}", tokens(i, 10))
    server.step({"r0": (10, 10)})
    server.step({"r0": (1, 1)})
    server.step({"r0": (1, 1), "r1": (10, 10), "r2": (9, 9)})
    server.step({"r0": (1, 1), "r1": (1, 1), "r2": (1, 1)})
    assert server.history.whole is None and server.history.known is None
    server.step({"r0": (1, 1), "r1": (1, 1), "r2": (1, 1)})
    assert server.history.whole is not None and server.history.known is not None


@pytest.mark.parametrize("chunks", [[10], [1, 9], [9, 1], [4, 1, 5]])
def test_prompt_computed_in_a_crowd_drafts_once_the_batch_is_small(crowd: Server, chunks: list[int]) -> None:
    """And so does another that begins alike; those that decode beside it keep their holes."""
    crowd.end("r2")
    crowd.add("new", tokens(9, 10))
    for chunk in chunks:
        ran = crowd.step({"r0": (1, 1), "r1": (1, 1), "new": (chunk, chunk)})
        assert ran == (False, {"r0": False, "r1": False, "new": False})
    crowd.end("r1")
    assert crowd.step({"r0": (1, 1), "new": (1, 1)}) == (False, {"r0": False, "new": True})
    crowd.end("new")
    crowd.add("alike", tokens(9, 12))
    assert crowd.step({"r0": (1, 1), "alike": (12, 12)}) == (False, {"r0": False, "alike": True})
    assert crowd.query_start_loc.np.tolist() == [0, 1, 5]


def test_prompt_alone_with_requests_that_cannot_draft_runs_through_the_heads(crowd: Server) -> None:
    """Its holes leave nobody to draft, but what it computes may begin another's prompt."""
    crowd.add("next turn", [*tokens(0, 10), 7, 7, *tokens(8, 9)])
    assert crowd.step({"next turn": (5, 5)}) == (False, {"next turn": False})
    assert crowd.step({"next turn": (4, 4)}) == (False, {"next turn": False})
    assert crowd.step({"next turn": (1, 1)}) == (True, {"next turn": False})


def test_what_was_computed_without_the_heads_never_drafts(crowd: Server) -> None:
    """Also after blocks of its own that are whole; where nobody else is there, the heads go on resting."""
    crowd.end("r2")
    assert crowd.step({"r0": (1, 1), "r1": (1, 1)}) == (True, {"r0": False, "r1": False})
    crowd.end("r1")
    crowd.add("new", tokens(9, 10))
    for step in range(8):
        assert crowd.step({"r0": (1, 1), "new": (10 if step == 0 else 1, 10)}) == (False, {"r0": False, "new": True})


def test_request_from_before_the_crowd_has_holes_too() -> None:
    server = Server(one_group(), 40)
    for i in range(3):
        server.add(f"r{i}", tokens(i, 10))
    server.step({"r0": (10, 10)})
    server.step({"r0": (1, 1), "r1": (10, 10), "r2": (10, 10)})
    rests, _ = server.step({"r0": (3, 1), "r1": (1, 1), "r2": (1, 1)})  # in the middle of a block, two drafts rejected
    assert rests
    server.end("r1")
    server.end("r2")
    server.add("new", tokens(9, 10))
    assert server.step({"r0": (1, 1), "new": (10, 10)}) == (False, {"r0": False, "new": True})


def test_blocks_taken_anew_are_whole(crowd: Server) -> None:
    for i in range(3):
        crowd.end(f"r{i}")
    assert not crowd.history.whole.all()
    for i in range(30):  # every block comes around
        crowd.add(f"n{i}", tokens(100 + i, 10))
        assert crowd.step({f"n{i}": (10, 10)}) == (False, {f"n{i}": True})
        crowd.end(f"n{i}")
    assert crowd.history.whole.all()


def test_prefix_hit_on_holes_does_not_draft_and_one_on_whole_blocks_does(crowd: Server) -> None:
    crowd.add("next turn", [*tokens(0, 10), 7, 7, 7, 7])
    crowd.add("same prompt", tokens(0, 10))
    ran = crowd.step({"next turn": (14, 14), "same prompt": (10, 10)})
    assert ran == (False, {"next turn": False, "same prompt": True})
    assert crowd.query_start_loc.np.tolist() == [0, 2, 4]  # 12 and 8 tokens came from the cache


def test_preempted_and_resumed_request(crowd: Server) -> None:
    """It drafts again if its blocks were given away meanwhile, and not if they are found in the prefix cache."""
    for i in range(1, 3):
        crowd.end(f"r{i}")
    crowd.preempt("r0")
    assert crowd.step({"r0": (14, 14)}) == (False, {"r0": False})  # 12 of them from the cache: two are left, a prompt
    assert crowd.step({"r0": (1, 1)}) == (True, {"r0": False})
    crowd.preempt("r0")
    crowd.manager.reset_prefix_cache()
    assert crowd.step({"r0": (16, 16)}) == (False, {"r0": True})


GROUPS = {
    "one": one_group(),
    "full of two": [KVCacheGroupSpec(layers(0, 1, 3, 4), SLIDING), KVCacheGroupSpec(layers(2, 5, 6, 7), FULL)],
    "sliding of two": [KVCacheGroupSpec(layers(0, 1, 2, 3), FULL), KVCacheGroupSpec(layers(4, 5, 6, 7), SLIDING)],
    "spread": [
        KVCacheGroupSpec(layers(0, 1), FULL),
        KVCacheGroupSpec(layers(2, 3, 6), SLIDING),
        KVCacheGroupSpec(layers(4, 5, 7), SLIDING),
    ],
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kept", [20, 400])  # steps that two common beginnings of prompts are in use
def test_account_of_every_slot(groups: str, kept: int, seed: int) -> None:
    """Random requests, drafts, prefix hits, preemptions and ends: step() compares with the slots at every step."""
    rng = np.random.default_rng(seed)
    server = Server(GROUPS[groups], 60)
    count = Counter(
        {"rests": 0, "may": 0, "may not": 0, "hits": 0, "hits on holes": 0, "crowds with prompts": 0, "pauses": 0}
    )
    names: list[str] = []
    for step in range(500):
        if len(names) < 4 and rng.random() < 0.25:
            shared = step // kept * 2 + int(rng.integers(2))
            prompt = tokens(shared, int(rng.integers(2, 24)))
            if names and rng.random() < 0.5:  # one that goes on from another's text
                prompt = list(server.requests[names[-1]].all_token_ids)[:60]
            names.append(f"r{step}")
            server.add(names[-1], prompt + rng.integers(0, 50, int(rng.integers(1, 4))).tolist())
        plan = {}
        for name in names:
            request = server.requests[name]
            missing = request.num_tokens - request.num_computed_tokens
            if rng.random() < 0.7:
                drafts = int(rng.integers(3)) if missing == 1 else 0
                chunk = int(rng.integers(1, 12)) if missing > 1 else 1 + drafts
                chunk = min(chunk, missing + drafts)
                plan[name] = (chunk, chunk if missing > 1 else int(rng.integers(1, chunk + 1)))
        fresh = [name for name in plan if name not in server.blocks]
        if plan:
            paused = rng.random() < 0.1
            rests, may = server.step(plan, paused, tuple(name for name in names if rng.random() < 0.3))
            count["pauses"] += rests and paused
            count["rests"] += rests
            count["may"] += sum(may.values())
            count["may not"] += len(may) - sum(may.values())
            count["crowds with prompts"] += len(may) > CUT_OFF and not rests
            starts = dict(zip(may, server.input_batch.num_computed_tokens_cpu.tolist(), strict=True)) if may else {}
            hits = [name for name in fresh if starts.get(name, 0) > 0]
            count["hits"] += len(hits)
            count["hits on holes"] += sum(not may[name] for name in hits) if len(may) <= CUT_OFF else 0
        for name in list(names):
            if rng.random() < 0.03 or server.requests[name].num_tokens > 80:
                server.end(name)
                names.remove(name)
            elif rng.random() < 0.02:
                server.preempt(name)
    assert min(count.values()) > 3, count


@pytest.mark.parametrize("groups", GROUPS)
def test_pauses_that_go_on(groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the heads miss is kept or not from one step to the next; blocks are looked at only where they change."""
    rng, looks = np.random.default_rng(0), 0
    server, stock = Server(GROUPS[groups], 60), HeadsHistory._table

    def counted(self: HeadsHistory, gid: int) -> Any:
        nonlocal looks
        looks += 1
        return stock(self, gid)

    monkeypatch.setattr(HeadsHistory, "_table", counted)
    paused, keeps, count = False, True, Counter[tuple[bool, bool]]()
    for step in range(600):
        if step % 50 == 0:
            for name in list(server.requests):
                server.end(name)
            for i in range(CUT_OFF):
                server.add(f"{step}-{i}", tokens(step + i, 5 + i))
            server.step(dict.fromkeys(server.requests, (20, 20)))
            continue
        paused, keeps = rng.random() < (0.9 if paused else 0.3), rng.random() < (0.9 if keeps else 0.2)
        before, looks = server.history._resting is not None, 0
        drafting = tuple(name for name in server.requests if not paused and rng.random() < 0.5)
        rests, _ = server.step(dict.fromkeys(server.requests, (1, 1)), paused, drafting, keeps)
        if rests and before and looks == 0:
            count[paused, keeps] += 1
    assert min(count[True, False], count[True, True]) > 20, count
