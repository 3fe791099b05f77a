# SPDX-License-Identifier: Apache-2.0
"""Which requests draft after a step, and how many tokens, without an engine."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams

from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.drafting.planner import DraftPlanner, Plan
from vllm_ppd.vllm_plugins.engine.requests import RequestOptions


@dataclass
class Batch:
    """Requests as the planner reads them."""

    prompt_lengths: np.ndarray
    lengths: np.ndarray
    token_ids: np.ndarray
    max_model_len: int = 100

    @property
    def num_requests(self) -> int:
        return len(self.lengths)

    @property
    def req_ids(self) -> list[str]:
        return [f"r{i}" for i in range(self.num_requests)]


def planner(requests: list[dict[str, Any]], **settings: Any) -> tuple[DraftPlanner, list[list[int]]]:
    """A planner over requests of {prompt, output, max_tokens, extra_args, emitted}, and what they emitted."""
    prompts = np.array([request["prompt"] for request in requests], dtype=np.int32)
    lengths = prompts + np.array([request.get("output", 1) for request in requests], dtype=np.int32)
    batch = Batch(prompts, lengths, np.arange(len(requests) * 200, dtype=np.int32).reshape(len(requests), 200))
    options = RequestOptions(len(requests), 3, 100, torch.device("cpu"))
    for i, request in enumerate(requests):
        # A request keeps its row while batch rows move: here they stand the other way round.
        given = {name: request[name] for name in ("extra_args", "thinking_token_budget") if name in request}
        params = SamplingParams(max_tokens=request.get("max_tokens", 50), **given)
        options.add(len(requests) - 1 - i, params)
    config = DraftingConfig(exit_layer=(3,), num_layers=6, **settings)
    emitted = [[1] * request.get("emitted", 1) for request in requests]
    return DraftPlanner(config, batch, options), emitted


def plan_of(made: DraftPlanner, emitted: list[list[int]], able: np.ndarray | None = None) -> Plan | None:
    return made.plan(emitted, np.arange(len(emitted))[::-1], able)


def drafts_of(plan: Plan | None) -> dict[int, int] | None:
    return None if plan is None else dict(zip(plan.rows.tolist(), plan.max_drafts.tolist(), strict=True))


def test_plan_positions_and_tokens() -> None:
    made, emitted = planner([{"prompt": 10, "output": 3}, {"prompt": 20}])
    plan = plan_of(made, emitted)
    assert plan is not None
    assert plan.base_positions.tolist() == [12, 20]
    assert plan.base_tokens.tolist() == [12, 220]
    assert drafts_of(plan) == {0: 3, 1: 3}


def test_partial_prefill_and_finished_requests_do_not_run() -> None:
    requests = [{"prompt": 10, "emitted": 0}, {"prompt": 10, "output": 5, "max_tokens": 5}, {"prompt": 10}]
    made, emitted = planner(requests)
    assert drafts_of(plan_of(made, emitted)) == {2: 3}


def test_limits_shorten_the_draft() -> None:
    requests = [{"prompt": 10, "output": 5, "max_tokens": 5 + left} for left in (1, 2, 3, 4, 9)]
    made, emitted = planner(requests)
    # With one token left there is nothing to draft: the next step emits it.
    assert drafts_of(plan_of(made, emitted)) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 3}
    made, emitted = planner([{"prompt": 98 - left, "output": 1} for left in (0, 1, 2, 5)])
    assert drafts_of(plan_of(made, emitted)) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_soft_cut_off_counts_drafting_requests_only() -> None:
    plain = {"prompt": 9}
    requests = [{**plain, "extra_args": {"ppd_draft": 0}}, plain, {**plain, "emitted": 0}, plain, plain]
    made, emitted = planner(requests, max_drafting_requests=2)
    assert drafts_of(plan_of(made, emitted)) == {0: 0, 1: 3, 3: 3, 4: 0}


def test_rows_that_cannot_draft_leave_the_soft_cut_off_to_others() -> None:
    made, emitted = planner([{"prompt": 9}] * 4, max_drafting_requests=2)
    able = np.array([True, False, True, True])
    assert drafts_of(plan_of(made, emitted, able)) == {0: 3, 1: 0, 2: 3, 3: 0}
    assert plan_of(made, emitted, np.zeros(4, dtype=bool)) is None


def test_hard_cut_off() -> None:
    requests = [{"prompt": 9}] * 3
    assert drafts_of(plan_of(*planner(requests, disable_by_batch_size=3))) == {0: 3, 1: 3, 2: 3}
    assert plan_of(*planner(requests, disable_by_batch_size=2)) is None


def test_nobody_drafts_means_no_shallow_work() -> None:
    made, emitted = planner([{"prompt": 9, "extra_args": {"ppd_draft": False}}])
    assert plan_of(made, emitted) is None


def test_nobody_drafts_beside_a_thinking_budget() -> None:
    """vLLM's V1 budgets count rejected drafts, and force ends of thoughts in rows of other requests' drafts."""
    assert drafts_of(plan_of(*planner([{"prompt": 10}, {"prompt": 20}]))) == {0: 3, 1: 3}
    assert drafts_of(plan_of(*planner([{"prompt": 10}, {"prompt": 20, "thinking_token_budget": 5}]))) is None
