# SPDX-License-Identifier: Apache-2.0
"""Our schedulers over vLLM's own, without an engine."""

import logging
from typing import Any

import pytest
import torch
from configured import from_dict
from conftest import Factory, our_log
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, Plan
from vllm_ppd.vllm_plugins.draft_length.policy import STEP, Step
from vllm_ppd.vllm_plugins.engine.metrics import MATCHED
from vllm_ppd.vllm_plugins.engine.scheduler import (
    GREEDY,
    LOOKED_UP,
    DraftingScheduler,
)

pytestmark = pytest.mark.engine
K = 3
TOKENS = 60
TABLE = CostTable(sizes=[1], counts=[0, K], seconds=[[1.0, 1.3]])


@pytest.fixture
def scheduler(tiny_model: Factory) -> Factory:
    """scheduler(rank, **settings): of one of two data-parallel engines that draft."""

    def get(rank: int, **settings: Any) -> DraftingScheduler:
        options = {
            "method": "early",
            "exit_layer": 3,
            "adaptive": "table",
        }
        vllm_config = from_dict(
            tiny_model(),
            options,
            enable_prefix_caching=False,
            async_scheduling=True,
            **settings,
        )
        vllm_config.cache_config.num_gpu_blocks = 64
        vllm_config.parallel_config.data_parallel_size = 2
        vllm_config.parallel_config.data_parallel_rank = rank
        spec = FullAttentionSpec(
            block_size=32, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        cache = KVCacheConfig(
            num_blocks=64,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        made = vllm_config.scheduler_config.get_scheduler_cls()(
            vllm_config=vllm_config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=32,
        )
        made.follow(TABLE)
        return made

    return get


def serve(scheduler: Scheduler, accepted: int) -> list[int]:
    """The drafts that each step makes for a request, so many of which are accepted."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=TOKENS,
        ignore_eos=True,
    )
    scheduler.add_request(Request("one", [1, 2], params, None))
    drafts = []
    waiting: list[Any] = []
    while scheduler.requests:
        step = scheduler.schedule()
        if step.num_scheduled_tokens:
            drafts.append(step.num_spec_tokens_to_schedule)
            waiting.append(step)
        if len(waiting) > 1 or not step.num_scheduled_tokens:
            step = waiting.pop(0)
            verified = len(step.scheduled_spec_decode_tokens.get("one", ()))
            tokens = [7] * (1 + min(verified, accepted))
            scheduler.update_from_output(
                step, ModelRunnerOutput(["one"], {"one": 0}, [tokens])
            )
    return drafts


def test_data_parallel_engines_choose_each_for_itself(
    scheduler: Factory,
) -> None:
    """The requests of one accept all drafts, those of the other none."""
    good = scheduler(0)
    poor = scheduler(1)
    assert good.draft_policy is not poor.draft_policy
    with our_log(logging.INFO) as messages:
        made = [serve(good, K), serve(poor, 0)]
    assert made[0][-1] == K and made[1][-1] == 0
    changed = "0 drafts in place of 3 drafts at 1 requests: "
    assert any(changed in message for message in messages)
    expected = [
        max(kind.expected[K] for kind in engine.draft_policy.acceptance[0].kinds)
        for engine in (good, poor)
    ]
    assert expected[0] > 2 > expected[1]
    # As without the other engine
    assert serve(scheduler(1), 0) == made[1]


@pytest.mark.parametrize("executor", [None, "external_launcher"])
def test_steps_are_described_and_learned(
    scheduler: Factory, monkeypatch: pytest.MonkeyPatch, executor: str | None
) -> None:
    """Beside a request that opted out and a prompt that goes on. Where each rank has a
    scheduler, none follows matches, of which it may learn in another step.
    """
    made = scheduler(
        0, max_num_batched_tokens=64, distributed_executor_backend=executor
    )
    asked: list[Any] = []
    seen: list[Any] = []
    policy = made.draft_policy
    monkeypatch.setattr(policy, "holds", lambda *_: False)
    monkeypatch.setattr(policy, "choose", lambda *args: asked.append(args))
    monkeypatch.setattr(policy, "observe", lambda *args: seen.append(args))

    def add(name: str, length: int, temperature: float, draft: bool) -> None:
        params = SamplingParams(
            temperature=temperature,
            max_tokens=TOKENS,
            ignore_eos=True,
            extra_args={"ppd_draft": draft},
        )
        made.add_request(Request(name, [5] * length, params, None))

    def run(**emitted: int) -> Step:
        scheduled = made.schedule()
        output = ModelRunnerOutput(
            list(emitted),
            {name: place for place, name in enumerate(emitted)},
            [[7] * count for count in emitted.values()],
        )
        matches = [name != "sampling" for name in emitted]
        setattr(output, MATCHED, matches)
        made.update_from_output(scheduled, output)
        return getattr(scheduled, STEP)

    add("greedy", 2, 0.0, True)
    add("sampling", 2, 1.0, True)
    add("out", 2, 0.0, False)
    run(greedy=1, sampling=1, out=1)
    assert asked == [(3, 0, ["greedy", "sampling"], [GREEDY, 0])]
    step = run(greedy=1 + K, sampling=1, out=1)
    assert step.steady() and step.verified == Plan(K)
    names = ["greedy", "sampling"]
    kinds = [GREEDY if executor else GREEDY + LOOKED_UP, 0]
    assert asked[-1] == (3, 0, names, kinds)
    accepted = [list(part) for part in seen[-1][2:]]
    assert accepted == [names, kinds, [1 + K, 1]]
    add("prompt", 150, 0.0, True)
    step = run(
        greedy=1,
        sampling=1,
        out=1,
        prompt=0,
    )
    tokens = made.max_num_scheduled_tokens
    assert step.prompt_tokens == tokens - 3 * (1 + K)
    assert asked[-1][:3] == (3, min(tokens, 150 - step.prompt_tokens), names)
