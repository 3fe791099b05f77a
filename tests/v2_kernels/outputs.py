# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities, grammars, drafts, budgets: our kernels against vLLM's."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from both_ways import CPU, ROWS, both_ways, ints, places_of, rows_of, starts_of
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import structured_outputs
from vllm.v1.worker.gpu.sample import logprob, prompt_logprob
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

V = 2500
LONGEST = 90
K = 3
NUMBERS = [1, 4, 3, 2]  # rows of logits by request


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [0, 5])
@both_ways("_topk_log_softmax_kernel", "_ranks_kernel", atol=5e-6)
def test_logprobs(dtype, number):
    logits = (4 * torch.randn(6, V)).to(dtype)
    sampled = torch.randint(0, V, (6,))
    scores = logprob.compute_topk_scores(
        logits, number, sampled, None, None, rows_of(6), 0
    )
    ranks = scores.selected_token_ranks
    if dtype is torch.bfloat16 and not hasattr(
        logprob._ranks_kernel, "vllm_name"
    ):
        # The interpreter compares the bits of bfloat16.
        ranks = (logits >= logits.gather(1, sampled[:, None])).sum(1)
    return scores.logprob_token_ids, scores.logprobs, ranks


@pytest.mark.parametrize("number", [0, 5])
@both_ways("_fill_logprob_token_ids_kernel", atol=5e-6)
def test_logprobs_of_named_tokens(number):
    rows = rows_of(6)
    state = logprob.LogprobTokenIdsState(ROWS, CPU)
    for row in range(ROWS):
        named = [None, [3, 4, 9], [7], [1, 2, 3, 4, 5, 6, 8]][row % 4]
        state.add_request(row, SamplingParams(logprob_token_ids=named))
    state.apply_staged_writes()
    most = state.max_num_token_ids(rows.numpy())
    sampled = torch.randint(0, V, (6,))
    logits = torch.randn(6, V)
    scores = logprob.compute_topk_scores(
        logits, number, sampled, None, state, rows, most
    )
    return scores.logprob_token_ids, scores.logprobs


@both_ways("_prompt_logprobs_token_ids_kernel")
def test_tokens_of_prompt_logprobs():
    return prompt_logprob.get_prompt_logprobs_token_ids(
        85,
        starts_of([1, 60, 4, 20], 2),
        rows_of(4),
        ints(0, 20, ROWS),
        ints(
            0,
            V,
            ROWS,
            LONGEST,
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [V, 2496])
@both_ways("_apply_grammar_bitmask_kernel")
def test_grammars(vocab_size, dtype):
    """Requests without a grammar, without drafts, and with fewer drafts than were planned."""
    logits = torch.randn(8, vocab_size).to(dtype)
    starts = starts_of([1, 4, 2, 1])
    names = (
        structured_outputs.StructuredOutputsWorker.__init__.__code__.co_varnames
    )
    more = {"num_bonus_tokens": 1} if "num_bonus_tokens" in names else {}
    worker = structured_outputs.StructuredOutputsWorker(
        16, vocab_size, CPU, mask_stride=K + 1, **more
    )
    batch = SimpleNamespace(
        req_ids=["a", "b", "c", "d"],
        cu_num_logits=starts,
        cu_num_logits_np=starts.numpy(),
        num_draft_tokens_per_req=np.array([0, 3, 3, 0]),
    )
    masks = 9 if more else 12  # of each place that was planned, or of all
    bitmask = ints(
        -(1 << 31),
        1 << 31,
        masks,
        -(-vocab_size // 32),
    ).numpy()
    worker.apply_grammar_bitmask(
        logits,
        batch,
        ["c", "a", "b"],
        bitmask,
    )
    return logits


@both_ways("_flatten_sampled_kernel")
def test_sampled_tokens_by_rows_of_logits():
    flat = torch.zeros(9, dtype=torch.int64)
    numbers = torch.tensor([1, 0, 3, 2], dtype=torch.int32)
    sampled = torch.randint(1, V, (4, K + 1))
    rejection_sampler._flatten_sampled_kernel[(4,)](
        flat,
        sampled,
        sampled.stride(0),
        numbers,
        starts_of([1, 1, 4, 3]),
        num_warps=1,
    )
    return flat


@both_ways("_gather_draft_sampled_kernel")
def test_drafts_by_rows_of_logits():
    return rejection_sampler.gather_draft_sampled(
        ints(0, V, 30),
        torch.randint(3, 40, (30,)),
        torch.randint(0, 30, (10,)),
        rows_of(4).repeat_interleave(torch.tensor(NUMBERS)),
        places_of(NUMBERS),
        ints(5, 30, ROWS),
    )


@pytest.mark.parametrize(
    ("start", "natural_end", "end"),
    [
        ([1], [2], [2]),
        ([1, 1], [2], [0, 2, 2]),
        ([1], [2, 0], [0, 0, 2, 0]),
    ],
)
@both_ways("_thinking_budget_kernel", "_update_committed_marker_cache_kernel")
def test_thinking_budgets(start, natural_end, end):
    """Texts grow by steps with drafts. Markers are in prompts, outputs and drafts, and
    across them.
    """
    lengths = ints(12, 30, ROWS)
    lengths[3] = 2600
    states = SimpleNamespace(
        max_num_reqs=ROWS,
        device=CPU,
        all_token_ids=SimpleNamespace(
            gpu=ints(
                0,
                3,
                ROWS,
                3000,
            )
        ),
        total_len=SimpleNamespace(gpu=lengths),
    )
    config = SimpleNamespace(
        reasoning_start_token_ids=start,
        reasoning_end_token_ids=end,
        natural_reasoning_end_token_ids=natural_end,
    )
    state = ThinkingBudgetState(states, config)
    for row in range(ROWS):
        budget = [None, 0, 2, 3, 1, 5, 0][row % 7]
        state.add_request(row, SamplingParams(thinking_token_budget=budget))
    state.apply_staged_writes()
    numbers = [*NUMBERS, 1]
    written = []
    for step in range(4):
        rows = rows_of(5)
        logits = torch.zeros(sum(numbers), 10)
        context = SimpleNamespace(
            idx_mapping=rows,
            idx_mapping_np=rows.numpy(),
            expanded_idx_mapping=rows.repeat_interleave(torch.tensor(numbers)),
            input_ids=ints(0, 3, sum(numbers)),
            expanded_local_pos=places_of(numbers),
        )
        state.apply(logits, context)
        written.append(logits)
        # Once, tokens that were counted on are taken back.
        lengths[rows] += ints(-9, -2, 5) if step == 2 else ints(0, 4, 5)
    assert any(logits.any() for logits in written)
    return written
