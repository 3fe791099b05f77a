# SPDX-License-Identifier: Apache-2.0
"""Which requests have missing KV in the draft layers: vLLM's own KV cache manager against a slot-by-slot account."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from vllm_ppd.vllm_plugins.methods.dynamo.missing_kv import MissingKV

BLOCK = 4  # tokens
LAYERS = 6
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=10)


def layers(*numbers: int) -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in numbers]


# The draft layers are 6 and 7.
GROUPS = {
    "one": [KVCacheGroupSpec(layers(*range(8)), FULL)],
    "full of two": [KVCacheGroupSpec(layers(0, 1, 3, 4), SLIDING), KVCacheGroupSpec(layers(2, 5, 6, 7), FULL)],
    "sliding, spread": [
        KVCacheGroupSpec(layers(0, 1), FULL),
        KVCacheGroupSpec(layers(2, 3, 6), SLIDING),
        KVCacheGroupSpec(layers(4, 5, 7), SLIDING),
    ],
}


class Server:
    """vLLM's KV cache manager and what its runner keeps of a batch; knows which slots hold the draft layers' KV."""

    def __init__(self, groups: list[KVCacheGroupSpec], num_blocks: int) -> None:
        init_none_hash(sha256)
        self.kv_cache_config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(
            self.kv_cache_config, max_model_len=96, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.requests: dict[str, Request] = {}
        self.blocks: dict[str, list[list[int]]] = {}  # as the runner has them: those behind a window stay
        self.held = np.zeros((num_blocks, BLOCK), dtype=bool)
        self.drafted = {gid: g for gid, g in enumerate(groups) if set(g.layer_names) & set(layers(6, 7))}
        self.missing = MissingKV(self, LAYERS)
        self.over: set[str] = set()
        self.resumed: set[str] = set()

    def add(self, name: str, tokens: list[int]) -> None:
        self.requests[name] = Request(name, tokens, SamplingParams(max_tokens=90), None, block_hasher=self.hasher)

    def end(self, name: str) -> None:
        self.manager.free(self.requests.pop(name))
        self.blocks.pop(name, None)
        self.over.add(name)

    def preempt(self, name: str) -> None:
        self.manager.free(self.requests[name])
        self.requests[name].num_computed_tokens = 0
        if self.blocks.pop(name, None):
            self.resumed.add(name)

    def _allocate(self, name: str, scheduled: int) -> int | None:
        """Give a request its blocks; returns the tokens that it may compute, None if there is no room."""
        request, hit, cached = self.requests[name], 0, None
        new = name not in self.blocks
        if new:
            cached, hit, _ = self.manager.get_computed_blocks(request)
            scheduled = min(scheduled, request.num_tokens - hit)
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

    def step(self, plan: dict[str, tuple[int, int]], skipped: bool = False) -> dict[str, bool]:
        """Run a step of {request: (tokens scheduled, tokens that count)}; returns which requests may draft after it."""
        started = {name for name in plan if name not in self.blocks}
        scheduled = {name: self._allocate(name, count) for name, (count, _) in plan.items()}
        names = [name for name, count in scheduled.items() if count is not None]
        if not names:
            return {}
        lengths = np.array([scheduled[name] for name in names])
        starts = np.array([self.requests[name].num_computed_tokens for name in names], dtype=np.int32)
        self.query_start_loc = SimpleNamespace(np=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        tables = []
        for gid in range(len(self.kv_cache_config.kv_cache_groups)):
            table = np.zeros((len(names), 32), dtype=np.int32)
            for row, name in enumerate(names):
                table[row, : len(self.blocks[name][gid])] = self.blocks[name][gid]
            tables.append(SimpleNamespace(get_numpy_array=lambda table=table: table, block_size=BLOCK))
        rows = {name: row for row, name in enumerate(names)}
        self.input_batch = SimpleNamespace(
            num_reqs=len(names), req_ids=names, req_id_to_index=rows, num_computed_tokens_cpu=starts, block_table=tables
        )
        started &= set(names)
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [SimpleNamespace(req_id=name) for name in started - self.resumed]
        output.scheduled_cached_reqs.resumed_req_ids, output.finished_req_ids = started & self.resumed, self.over
        self.missing.update_requests(output)
        self.over, self.resumed = set(), self.resumed - started
        self.missing.begin_step(skipped)
        for name, start, length in zip(names, starts, lengths, strict=True):
            places = np.arange(start, start + length)
            for gid in self.drafted:
                self.held[np.array(self.blocks[name][gid])[places // BLOCK], places % BLOCK] = not skipped
        complete = self.missing.complete()
        assert self.missing.everywhere() == (complete is not None and not complete.any())
        for name, length in zip(names, lengths.tolist(), strict=True):
            request = self.requests[name]
            request.num_computed_tokens += min(length, plan[name][1])
            if request.num_computed_tokens >= request.num_tokens:
                request.append_output_token_ids([7] * (request.num_computed_tokens + 1 - request.num_tokens))
        return dict(zip(names, [True] * len(names) if complete is None else complete.tolist(), strict=True))

    def lacks(self, name: str) -> bool:
        """Whether a request attends to slots without the draft layers' KV."""
        end = self.requests[name].num_computed_tokens
        for gid, group in self.drafted.items():
            window = getattr(group.kv_cache_spec, "sliding_window", None)
            places = np.arange(0 if window is None else max(0, end - window), end)
            if not self.held[np.array(self.blocks[name][gid], dtype=int)[places // BLOCK], places % BLOCK].all():
                return True
        return False


def tokens(seed: int, count: int) -> list[int]:
    return [1000 * (seed + 1) + i for i in range(count)]


def test_a_prefix_is_as_complete_as_each_of_its_blocks() -> None:
    server = Server(GROUPS["one"], 40)
    server.add("r", tokens(0, 10))
    assert server.step({"r": (10, 10)}) == {"r": True}
    for skipped in (False, True, False, False):  # the second step fills the third block
        may = server.step({"r": (1, 1)}, skipped)
    assert may == {"r": False}
    server.end("r")
    server.add("prompt", tokens(0, 11))
    server.add("next turn", [*tokens(0, 10), 7, 7, 7, 7])
    server.step({"prompt": (11, 11)})
    assert server.query_start_loc.np.tolist() == [0, 3]  # two blocks are hit
    may = server.step({"prompt": (1, 1), "next turn": (14, 14)})
    assert server.query_start_loc.np.tolist() == [0, 1, 3]  # and three
    assert may == {"prompt": True, "next turn": False}


@pytest.mark.parametrize("cached", [True, False])
def test_a_preempted_request_drafts_again_if_all_of_it_is_computed_again(cached: bool) -> None:
    server = Server(GROUPS["one"], 40)
    server.add("r", tokens(0, 10))
    server.step({"r": (10, 10)})
    for _ in range(3):
        assert server.step({"r": (1, 1)}, skipped=True) == {"r": False}
    server.preempt("r")
    if not cached:
        server.manager.reset_prefix_cache()
    assert server.step({"r": (14, 14)}) == {"r": not cached}


def test_a_finished_request_says_nothing_of_another_by_its_name() -> None:
    server = Server(GROUPS["one"], 40)
    server.add("r", tokens(0, 3))
    server.step({"r": (3, 3)})
    server.step({"r": (1, 1)}, skipped=True)
    server.end("r")
    server.add("r", tokens(1, 3))
    assert server.step({"r": (3, 3)}) == {"r": True} and not server.missing.requests


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("seed", "drafts_in_skipped"), [(0, False), (1, False), (2, True)])
def test_account_of_every_slot(groups: str, seed: int, drafts_in_skipped: bool) -> None:
    """Random requests, drafts, prefix hits, preemptions and ends: no request that lacks KV may draft.

    Nor are others kept from it, but for slots that were missing before they were written again, and behind a window.
    """
    rng = np.random.default_rng(seed)
    server = Server(GROUPS[groups], 60)
    exact = "sliding" not in groups and not drafts_in_skipped
    count = Counter(dict.fromkeys(("skipped", "may", "may not", "hits", "hits that lack", "preempted"), 0))
    names: list[str] = []
    skipping = False
    for step in range(900):
        if len(names) < 4 and rng.random() < 0.25:
            prompt = tokens(step // 200 * 2 + int(rng.integers(2)), int(rng.integers(2, 24)))
            if names and rng.random() < 0.5:  # one that goes on from another's text
                prompt = list(server.requests[names[-1]].all_token_ids)[:60]
            names.append(f"r{step}")
            server.add(names[-1], prompt + rng.integers(0, 50, int(rng.integers(1, 4))).tolist())
        skipping = rng.random() < (0.8 if skipping else 0.15)
        plan = {}
        for name in names:
            request = server.requests[name]
            left = request.num_tokens - request.num_computed_tokens
            if rng.random() > 0.7:
                continue
            if left > 1 or name not in server.blocks:
                chunk = min(int(rng.integers(1, 12)), left)
                plan[name] = chunk, chunk
            else:
                chunk = 1 + int(rng.integers(3)) * (drafts_in_skipped or not skipping)
                plan[name] = chunk, int(rng.integers(1, chunk + 1))
        fresh = {name for name in plan if name not in server.blocks}
        prompts = any(server.requests[name].num_tokens > server.requests[name].num_computed_tokens + 1 for name in plan)
        may = server.step(plan, skipped := skipping and not prompts and not fresh)
        for name, able in may.items():
            assert not (able and server.lacks(name))
            assert able or not exact or server.lacks(name)
            hit = name in fresh and server.input_batch.num_computed_tokens_cpu[server.input_batch.req_ids.index(name)]
            count.update({"hits": hit > 0, "hits that lack": hit > 0 and not able, "may" if able else "may not": 1})
        count["skipped"] += skipped and bool(may)
        for name in list(names):
            if rng.random() < 0.03 or server.requests[name].num_tokens > 80:
                server.end(name)
                names.remove(name)
            elif rng.random() < 0.02:
                server.preempt(name)
                count["preempted"] += 1
    assert min(count.values()) > 5, count
