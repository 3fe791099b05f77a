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

from vllm_ppd.vllm_plugins import entry_states
from vllm_ppd.vllm_plugins.heads_history import LOST, HeadsHistory
from vllm_ppd.vllm_plugins.states import flat_ranges

BLOCK = 4  # tokens
LAYERS = 6
CUT_OFF = 2
FITS = 8  # numbers of a state, in two layers' entries of four
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=10)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_states, "get_tp_group", lambda: SimpleNamespace(world_size=1))


def layers(*numbers: int) -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in numbers]


class Attention:
    """A layer of the heads: where an entry lies in its cache cannot be told by the cache's shape."""

    num_kv_heads, head_size = 1, 2

    def __init__(self, num_blocks: int, room: int) -> None:
        self.kv_cache = torch.zeros(num_blocks, 1, BLOCK, room)
        self.impl = self

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        by_number = cache.view(len(cache), -1, BLOCK)  # all tokens' first numbers, all tokens' second ones, ...
        by_number[slots // BLOCK, :, slots % BLOCK] = torch.cat([value, key], dim=-1).flatten(1)


class Server:
    """vLLM's KV cache manager and what its runner keeps of a batch; counts which slots hold the heads' KV.

    A request is computed by step(), which takes {request id: (tokens scheduled, tokens that count)}.
    """

    device = torch.device("cpu")
    model_config = SimpleNamespace(dtype=torch.float32)

    def __init__(self, groups: list[KVCacheGroupSpec], num_blocks: int, hidden_size: int = 6) -> None:
        init_none_hash(sha256)
        self.kv_cache_config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(self.kv_cache_config, max_model_len=96, scheduler_block_size=BLOCK,
                                      hash_block_size=BLOCK)  # fmt: skip
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.requests: dict[str, Request] = {}
        self.blocks: dict[str, list[list[int]]] = {}  # as the runner has them: those behind a window stay
        self.held = np.zeros((num_blocks, BLOCK), dtype=bool)
        heads = layers(6, 7)
        self.heads = [gid for gid, group in enumerate(groups) if set(group.layer_names) & set(heads)]
        self.compilation_config = SimpleNamespace(
            static_forward_context={name: Attention(num_blocks, 4) for name in heads}
        )
        self.hidden_size = hidden_size
        self.history = HeadsHistory(self, LAYERS, hidden_size, CUT_OFF)

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
        lasting: bool = False, asleep: bool = False,
    ) -> tuple[bool, dict[str, bool]]:  # fmt: skip
        """Run a step, of a pause in drafting or not: (whether the heads rested, which requests they know all of).

        Those of `drafting` that can catch up do so after it; what a token's state is says what it is of. Nothing is
        looked at where it is one of a nap.
        """
        scheduled = {name: self.allocate(name, count) for name, (count, _) in plan.items()}
        names = [name for name, count in scheduled.items() if count is not None]
        if not names:
            return False, {}
        asleep = asleep and len(names) == len(plan)
        lengths = np.array([scheduled[name] for name in names])
        starts = np.array([self.requests[name].num_computed_tokens for name in names], dtype=np.int32)
        starting = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.query_start_loc = SimpleNamespace(np=starting)
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
        known = [] if asleep else [self.missed(name) == 0 for name in names]
        decoding = all(
            request.num_output_tokens > 0 and start == request.num_tokens - 1
            for request, start in zip(requests, starts.tolist(), strict=True)
        )
        rests, crowded = self.history.begin_step(paused, lasting, asleep), len(names) > CUT_OFF
        if self.hidden_size <= FITS:
            assert rests == (crowded or paused)
        elif not asleep and self.history.missing is not None:
            assert rests == (decoding and (crowded or lasting or not any(known)))
        self.run(names, starts, lengths, heads=not rests)
        counted = np.array([min(int(length), plan[name][1]) for name, length in zip(names, lengths, strict=True)])
        if self.history.keeps:
            stem = torch.zeros(starting[-1] + 3, self.hidden_size)  # and padding
            stem[: starting[-1], 0] = torch.from_numpy(flat_ranges(starts, lengths))
            said = [self.said(*one) for one in zip(names, starts, lengths, strict=True)]
            for of_request, count in zip(said, counted.tolist(), strict=True):
                of_request[count:] = -1
            stem[: starting[-1], -1] = torch.cat(said)
            self.history.keep(stem)
            stem += 1  # the next step writes over it
            stem -= 1
        done = starts + counted >= self.input_batch.num_tokens_no_spec
        if not asleep:
            self.check(names, starts + lengths)
            self.catch_up(np.array([r for r, name in enumerate(names) if name in drafting and done[r]], int), counted)
        found = None if asleep else self.history.missing
        may = dict(zip(names, (np.ones(len(names), bool) if found is None else found == 0).tolist(), strict=True))
        for name, count in zip(names, counted.tolist(), strict=True):
            request = self.requests[name]
            request.num_computed_tokens += count
            if request.num_computed_tokens >= request.num_tokens:
                request.append_output_token_ids([7] * (request.num_computed_tokens + 1 - request.num_tokens))
        return rests, may

    def check(self, names: list[str], ends: np.ndarray) -> None:
        """What the history says is missing, against the slots."""
        missing_of_all = np.zeros(len(names)) if self.history.missing is None else self.history.missing
        for name, end, missing in zip(names, ends.tolist(), missing_of_all, strict=True):
            expected = self.missed(name, end)
            assert (missing > 0) >= (expected > 0)
            if self.history.states is None:
                assert missing == 0 or missing >= LOST
            elif self.history._window is None:
                assert missing == expected

    def catch_up(self, rows: np.ndarray, counted: np.ndarray) -> None:
        names = self.input_batch.req_ids
        if self.history.missing is not None:
            rows = rows[self.history.missing[rows] < LOST]
        missed = self.history.catch_up(rows, self.query_start_loc.np[rows] + counted[rows] - 1)
        if missed is None:
            return
        assert missed.state[:, 0].tolist() == missed.positions.tolist()
        said = [self.said(names[row], place, 1)[0] for row, place in zip(missed.rows, missed.positions, strict=True)]
        assert missed.state[:, -1].tolist() == said
        for gid in self.heads:
            for row, place in zip(missed.rows, missed.positions, strict=True):
                self.held[self.blocks[names[row]][gid][place // BLOCK], place % BLOCK] = True
        for row in np.unique(missed.rows):
            newest = missed.positions[missed.rows == row][-1]
            assert newest == self.input_batch.num_computed_tokens_cpu[row] + counted[row] - 1
            assert self.missed(names[row], newest + 1) == 0 == self.history.missing[row]

    def said(self, name: str, start: int, length: int) -> torch.Tensor:
        """What the states of some tokens are told by."""
        ids = [*self.requests[name].all_token_ids, *[7] * 16]
        return torch.tensor(ids[int(start) : int(start) + int(length)], dtype=torch.float32)

    def run(self, names: list[str], starts: np.ndarray, lengths: np.ndarray, heads: bool) -> None:
        """Write the KV of a step, in the heads' layers or not."""
        for name, start, length in zip(names, starts, lengths, strict=True):
            places = np.arange(start, start + length)
            for gid in self.heads:
                self.held[np.array(self.blocks[name][gid])[places // BLOCK], places % BLOCK] = heads

    def missed(self, name: str, end: int | None = None) -> int:
        """Slots without the heads' KV that a request's token before `end` attends to, in the group that has most."""
        end = self.requests[name].num_computed_tokens if end is None else end
        most = 0
        for gid in self.heads:
            window = getattr(self.kv_cache_config.kv_cache_groups[gid].kv_cache_spec, "sliding_window", None)
            places = np.arange(0 if window is None else max(0, end - window), end)
            blocks = np.array(self.blocks[name][gid], dtype=np.int64)
            most = max(most, int((~self.held[blocks[places // BLOCK], places % BLOCK]).sum()))
        return most


def one_group() -> list[KVCacheGroupSpec]:
    return [KVCacheGroupSpec(layers(*range(8)), FULL)]


def tokens(seed: int, count: int) -> list[int]:
    return [1000 * (seed + 1) + i for i in range(count)]


@pytest.fixture(params=[6, 9])
def crowd(request: pytest.FixtureRequest) -> Server:
    """Three requests of 10 tokens that have emitted 4 more together; the heads rested when they took in 3 of these."""
    server = Server(one_group(), 40, request.param)
    for i in range(3):
        server.add(f"r{i}", tokens(i, 10))
    server.step({f"r{i}": (5, 5) for i in range(2)})
    server.step({"r2": (10, 10), "r1": (5, 5)})
    server.step({"r0": (5, 5)})
    assert server.history.missing is None
    for _ in range(3):
        assert server.step({f"r{i}": (1, 1) for i in range(3)}) == (True, {"r0": False, "r1": False, "r2": False})
    return server


def fits(server: Server) -> bool:
    return server.hidden_size <= FITS


def test_who_was_in_a_crowd_drafts_after_catching_up_where_states_fit(crowd: Server) -> None:
    crowd.end("r2")
    both = {"r0": (1, 1), "r1": (1, 1)}
    rests = not fits(crowd)  # nobody could draft
    assert crowd.step(both) == (rests, {"r0": False, "r1": False})
    assert crowd.step(both, drafting=("r1",)) == (rests, {"r0": False, "r1": fits(crowd)})
    rests, may = crowd.step(both, drafting=("r0", "r1"))
    assert may == {"r0": fits(crowd), "r1": fits(crowd)}
    assert crowd.step(both, paused=True, lasting=True) == (True, {"r0": False, "r1": False})


@pytest.mark.parametrize("chunks", [[10], [1, 9], [9, 1], [4, 1, 5]])
def test_prompt_computed_in_a_crowd(crowd: Server, chunks: list[int]) -> None:
    """Its states are kept, also for another that begins alike; or the heads run, and both draft."""
    crowd.end("r2")
    crowd.add("new", tokens(9, 10))
    for chunk in chunks:
        rests, may = crowd.step({"r0": (1, 1), "r1": (1, 1), "new": (chunk, chunk)})
        assert rests == fits(crowd)
        assert may == {"r0": False, "r1": False, "new": not fits(crowd)}
    crowd.end("r1")
    crowd.step({"r0": (1, 1), "new": (1, 1)}, drafting=("new",))
    assert crowd.step({"r0": (1, 1), "new": (1, 1)}) == (False, {"r0": False, "new": True})
    crowd.end("new")
    crowd.add("alike", tokens(9, 12))
    # Eight of its tokens are in the cache, which "new" has caught up with.
    assert crowd.step({"r0": (1, 1), "alike": (12, 12)}) == (False, {"r0": False, "alike": True})
    assert crowd.query_start_loc.np.tolist() == [0, 1, 5]


def test_hit_on_blocks_whose_tokens_the_heads_have_not_seen(crowd: Server) -> None:
    crowd.add("next turn", [*tokens(0, 10), 7, 7, 7, 7])
    crowd.add("same prompt", tokens(0, 10))
    rests, may = crowd.step({"next turn": (14, 14), "same prompt": (10, 10)}, drafting=("next turn",))
    assert not rests and crowd.query_start_loc.np.tolist() == [0, 2, 4]  # 12 and 8 tokens came from the cache
    assert may == {"next turn": fits(crowd), "same prompt": True}
    crowd.add("once more", [*tokens(0, 10), 7, 7, 7, 7])
    assert crowd.step({"once more": (14, 14)}) == (False, {"once more": fits(crowd)})


def test_request_from_before_the_crowd_has_missed_something_too() -> None:
    server = Server(one_group(), 40)
    for i in range(3):
        server.add(f"r{i}", tokens(i, 10))
    server.step({"r0": (10, 10)})
    server.step({"r0": (1, 1), "r1": (10, 10)})
    assert server.history.missing is None
    # In the middle of a block; two drafts are rejected, whose places its next tokens take.
    assert server.step({"r0": (3, 1), "r1": (1, 1), "r2": (10, 10)})[0]
    server.end("r1")
    assert server.step({"r0": (1, 1), "r2": (1, 1)}, drafting=("r0",)) == (False, {"r0": True, "r2": False})


def test_newest_token_is_the_last_of_the_drafts_that_were_accepted(crowd: Server) -> None:
    """Drafts need not be the heads': who looks its own text up may have some before the heads have caught up."""
    if fits(crowd):
        crowd.end("r2")
        ran = crowd.step({"r0": (4, 3), "r1": (3, 1)}, drafting=("r0", "r1"))
        assert ran == (False, {"r0": True, "r1": True})
        assert crowd.step({"r0": (1, 1), "r1": (1, 1)}) == (False, {"r0": True, "r1": True})


def test_blocks_taken_anew_are_seen(crowd: Server) -> None:
    for i in range(3):
        crowd.end(f"r{i}")
    assert crowd.history._unseen[0].any()
    for i in range(30):  # every block comes around
        crowd.add(f"n{i}", tokens(100 + i, 12))
        assert crowd.step({f"n{i}": (12, 12)}) == (False, {f"n{i}": True})
        crowd.end(f"n{i}")
    assert not crowd.history._unseen[0].any()


def test_preempted_and_resumed_request(crowd: Server) -> None:
    """It knows its past if its blocks were given away meanwhile, and not if they are found in the prefix cache."""
    for i in range(1, 3):
        crowd.end(f"r{i}")
    crowd.preempt("r0")
    assert crowd.step({"r0": (14, 14)}) == (False, {"r0": False})  # 12 of them from the cache: two are left, a prompt
    assert crowd.step({"r0": (1, 1)}) == (not fits(crowd), {"r0": False})
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
@pytest.mark.parametrize("kept", [20, 400])  # steps that two common beginnings of prompts are in use
@pytest.mark.parametrize(("seed", "hidden_size"), [(0, 6), (1, 6), (2, 9)])
def test_account_of_every_slot(groups: str, kept: int, seed: int, hidden_size: int) -> None:
    """Random requests, drafts, prefix hits, preemptions and ends: step() compares with the slots at every step."""
    rng = np.random.default_rng(seed)
    server = Server(GROUPS[groups], 60, hidden_size)
    count = Counter(dict.fromkeys(("rests", "may", "may not", "hits", "hits on unseen", "crowds", "pauses", "naps"), 0))
    paused = False
    names: list[str] = []
    for step in range(900):
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
            paused = rng.random() < (0.8 if paused else 0.2)
            drafting = tuple(name for name in names if rng.random() < 0.3 and not paused)
            rests, may = server.step(plan, paused, drafting, lasting=paused and rng.random() < 0.5)
            crowded = len(may) > CUT_OFF
            count["pauses"] += rests and paused
            count["rests"] += rests
            count["may"] += sum(may.values())
            count["may not"] += len(may) - sum(may.values())
            count["crowds"] += crowded
            starts = dict(zip(may, server.input_batch.num_computed_tokens_cpu.tolist(), strict=True)) if may else {}
            hits = [name for name in fresh if starts.get(name, 0) > 0]
            count["hits"] += len(hits)
            count["hits on unseen"] += 0 if rests else sum(not may[name] for name in hits)
            same = dict.fromkeys(may, (1, 1))
            of_names = [server.requests[name] for name in same]
            whole = all(request.num_tokens == request.num_computed_tokens + 1 for request in of_names)
            if paused and rests and whole and rng.random() < 0.2:
                for _ in range(int(rng.integers(1, 8))):
                    server.step(same, paused, asleep=True)
                    count["naps"] += 1
        for name in list(names):
            if rng.random() < 0.03 or server.requests[name].num_tokens > 80:
                server.end(name)
                names.remove(name)
            elif rng.random() < 0.02:
                server.preempt(name)
    assert min(count.values()) > 1, count


def test_states_of_a_pause_are_written_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless blocks may change hands: every step() compares with the slots, and who drafts gets what was kept."""
    server, writes, stock = Server(one_group(), 60), 0, entry_states.EntryStates._write

    def counted(self: entry_states.EntryStates, *args: Any) -> None:
        nonlocal writes
        writes += 1
        stock(self, *args)

    monkeypatch.setattr(entry_states.EntryStates, "_write", counted)
    for i in range(2):
        server.add(f"r{i}", tokens(i, 5))
    both = {"r0": (1, 1), "r1": (1, 1)}
    server.step({"r0": (5, 5), "r1": (5, 5)}, paused=True)
    assert writes == 1
    for _ in range(20):
        assert server.step(both, paused=True)[0]
    assert writes == 1
    server.end("r0")
    server.add("new", tokens(3, 5))
    server.step({"new": (5, 5), "r1": (1, 1)}, paused=True)  # may have blocks of what is waiting
    assert writes == 3
    for _ in range(5):
        server.step({"new": (1, 1), "r1": (1, 1)}, paused=True)
    server.step({"new": (1, 1), "r1": (1, 1)}, paused=False, drafting=("new", "r1"))
    assert writes == 4


def test_steps_of_a_nap_are_counted_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to where a block begins: until then nothing is written and no slot is looked up."""
    server, slots_of, looked = Server(one_group(), 60), HeadsHistory._slots_of, []
    monkeypatch.setattr(HeadsHistory, "_slots_of", lambda *args: looked.append(1) or slots_of(*args))
    server.add("r0", tokens(0, BLOCK))
    server.step({"r0": (BLOCK, BLOCK)}, paused=True)
    server.step({"r0": (1, 1)}, paused=True)
    assert server.history._room == BLOCK - 1
    looked.clear()
    for _ in range(BLOCK - 1):
        server.step({"r0": (1, 1)}, paused=True, asleep=True)
    assert not looked and len(server.history._after) == BLOCK - 1
    server.step({"r0": (1, 1)}, paused=True, asleep=True)
    assert looked and not server.history._after
    assert server.step({"r0": (1, 1)}, drafting=("r0",)) == (False, {"r0": True})  # with what each one's state says


def test_trials_of_a_pause_that_draft_nothing() -> None:
    """Who has caught up in one resting step catches up with the next alone."""
    server = Server(one_group(), 60)
    server.add("r0", tokens(0, 5))
    server.step({"r0": (5, 5)}, paused=True)
    for drafting in ((), ("r0",), (), ("r0",), ("r0",), ()):
        assert server.step({"r0": (1, 1)}, paused=True, drafting=drafting)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["backend", "places", "shape"])
def test_states_are_found_where_they_were_put(how: str, dtype: torch.dtype) -> None:
    """As a CPU backend writes, where it cannot as it quantizes, and where the cache's shape says where an entry is."""
    server = Server(one_group(), 5)
    server.model_config = SimpleNamespace(dtype=dtype)
    for layer in server.compilation_config.static_forward_context.values():
        layer.kv_cache = torch.zeros(BLOCK, 1, 5, 4, dtype=dtype).transpose(0, 2)  # blocks are not contiguous
        if how != "shape":
            layer.kv_cache = layer.kv_cache.contiguous()
    if how == "shape":
        server.device = SimpleNamespace(type="cuda")
    states = entry_states.EntryStates(server, [(0, name) for name in layers(6, 7)], 6)
    states.device, states.native = torch.device("cpu"), how == "backend"
    assert (states.places is None) == (how == "shape")
    generator = torch.Generator().manual_seed(0)
    kept = torch.randn(20, 6, generator=generator).to(dtype)
    slots = torch.randperm(20, generator=generator).numpy()[None]
    states.put(slots[:, :12], kept[:12])
    states.put(slots[:, 12:], kept[12:], later=True)
    order = torch.randperm(20, generator=generator).numpy()
    assert torch.equal(states.get(slots[:, order]), kept[order])


def test_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a state of 9 numbers does not fit 2 entries of 4"):
        entry_states.EntryStates(Server(one_group(), 5), [(0, name) for name in layers(6, 7)], 9)
