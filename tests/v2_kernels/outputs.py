# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities, grammars, drafts, budgets, embeddings: our kernels against vLLM's."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from both_ways import CPU, Tensors, compare, integers, rows_of, starts_of
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import structured_outputs
from vllm.v1.worker.gpu.model_states.prompt_embeds import PromptEmbedsState
from vllm.v1.worker.gpu.sample import logprob, prompt_logprob
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.ngram import speculator as ngram

ROWS = 7
V = 2500
LONGEST = 90
K = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [0, 5])
@pytest.mark.parametrize("named", [False, True])
def test_logprobs(dtype: torch.dtype, number: int, named: bool) -> None:
    def case(generator: torch.Generator) -> Tensors:
        logits = (4 * torch.randn(6, V, generator=generator)).to(dtype)
        rows = rows_of(generator, 6, ROWS)
        state = logprob.LogprobTokenIdsState(ROWS, CPU)
        for row, ids in enumerate(
            [None, [3, 4, 9], None, [7], None, [1, 2, 3, 4, 5, 6, 8], None]
        ):
            state.add_request(row, SamplingParams(logprob_token_ids=ids))
        state.apply_staged_writes()
        most = state.max_num_token_ids(rows.numpy()) if named else 0
        sampled = integers(generator, 0, V, 6, dtype=torch.int64)
        scores = logprob.compute_topk_scores(
            logits, number, sampled, None, state, rows, most
        )
        ranks = (logits >= logits.gather(1, sampled[:, None])).sum(1)
        if (
            dtype is torch.float32
            or logprob._ranks_kernel.__class__.__name__ == "Recorded"
        ):
            # The interpreter compares the bits of bfloat16
            ranks = scores.selected_token_ranks
        return {
            "ids": scores.logprob_token_ids,
            "values": scores.logprobs,
            "ranks": ranks,
        }

    kernels = ["_topk_log_softmax_kernel", "_ranks_kernel"]
    if named:
        kernels.append("_fill_logprob_token_ids_kernel")
    compare(case, number, *kernels, atol=5e-6)


def test_tokens_of_prompt_logprobs() -> None:
    def case(generator: torch.Generator) -> Tensors:
        rows = rows_of(generator, 4, ROWS)
        lengths = torch.tensor([1, 60, 4, 20])
        ids = prompt_logprob.get_prompt_logprobs_token_ids(
            85,
            starts_of(lengths, 2),
            rows,
            integers(generator, 0, 20, ROWS),
            integers(generator, 0, V, ROWS, LONGEST),
        )
        return {"ids": ids}

    compare(case, 0, "_prompt_logprobs_token_ids_kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [V, 2496])
def test_grammars(vocab_size: int, dtype: torch.dtype) -> None:
    """Requests without a grammar, without drafts, and with fewer drafts than were planned."""

    def case(generator: torch.Generator) -> Tensors:
        numbers = torch.tensor([1, 4, 2, 1])
        planned = np.array([0, 3, 3, 0])
        logits = torch.randn(8, vocab_size, generator=generator).to(dtype)
        starts = starts_of(numbers)
        names = structured_outputs.StructuredOutputsWorker.__init__.__code__.co_varnames
        more = {"num_bonus_tokens": 1} if "num_bonus_tokens" in names else {}
        worker = structured_outputs.StructuredOutputsWorker(
            16, vocab_size, CPU, mask_stride=K + 1, **more
        )
        batch = SimpleNamespace(
            req_ids=["a", "b", "c", "d"],
            cu_num_logits=starts,
            cu_num_logits_np=starts.numpy(),
            num_draft_tokens_per_req=planned,
        )
        masks = 9 if more else 12  # of each place that was planned, or of all
        bitmask = integers(
            generator, -(1 << 31), 1 << 31, masks, -(-vocab_size // 32)
        ).numpy()
        worker.apply_grammar_bitmask(logits, batch, ["c", "a", "b"], bitmask)
        return {"logits": logits}

    compare(case, vocab_size, "_apply_grammar_bitmask_kernel")


def test_sampled_tokens_by_rows_of_logits() -> None:
    def case(generator: torch.Generator) -> Tensors:
        flat = torch.zeros(9, dtype=torch.int64)
        numbers = torch.tensor([1, 0, 3, 2], dtype=torch.int32)
        sampled = integers(generator, 1, V, 4, K + 1, dtype=torch.int64)
        starts = starts_of(torch.tensor([1, 1, 4, 3]))
        rejection_sampler._flatten_sampled_kernel[(4,)](
            flat, sampled, sampled.stride(0), numbers, starts, num_warps=1
        )
        return {"flat": flat}

    compare(case, 0, "_flatten_sampled_kernel")


def test_drafts_by_rows_of_logits() -> None:
    def case(generator: torch.Generator) -> Tensors:
        indices = integers(generator, 0, 30, 10, dtype=torch.int64)
        rows = rows_of(generator, 4, ROWS).repeat_interleave(torch.tensor([1, 4, 3, 2]))
        local = torch.cat(
            [torch.arange(number, dtype=torch.int32) for number in (1, 4, 3, 2)]
        )
        drafts, positions = rejection_sampler.gather_draft_sampled(
            integers(generator, 0, V, 30),
            integers(generator, 3, 40, 30, dtype=torch.int64),
            indices,
            rows,
            local,
            integers(generator, 5, 30, ROWS),
        )
        return {"drafts": drafts, "positions": positions}

    compare(case, 0, "_gather_draft_sampled_kernel")


@pytest.mark.parametrize(
    ("shortest", "longest", "alphabet"), [(1, 3, 3), (2, 5, 2), (3, 3, 50), (1, 8, 1)]
)
def test_lookups(shortest: int, longest: int, alphabet: int) -> None:
    found = 0

    def case(generator: torch.Generator) -> Tensors:
        nonlocal found
        tokens = integers(generator, 0, alphabet, ROWS, LONGEST)
        rows = rows_of(generator, 6, ROWS)
        lengths = integers(generator, 0, LONGEST + 1, ROWS)
        lengths[rows[:3]] = torch.tensor([0, 1, 2], dtype=torch.int32)
        states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=tokens),
            total_len=SimpleNamespace(gpu=lengths),
        )
        speculator = object.__new__(ngram.NgramGPUSpeculator)
        vars(speculator).update(
            req_states=states,
            min_n=shortest,
            max_n=longest,
            max_model_len=LONGEST,
            block_l=64,
            n_blocks=2,
            num_speculative_steps=K,
            scratch=torch.full((8, 2), -7),
            drafts=torch.full((8, K), -7),
        )
        batch = SimpleNamespace(num_reqs=6, idx_mapping=rows)
        last = integers(generator, 60, 90, ROWS, 1, dtype=torch.int64)
        numbers = torch.tensor([1, 1, 1, 2, 0, 1], dtype=torch.int32)
        drafts = speculator.propose(
            batch,
            None,
            None,
            tokens,
            None,
            numbers,
            numbers,
            last,
            tokens,
            tokens,
            tokens,
        )
        found += int((drafts < 60).sum())
        return {"drafts": drafts, "best": speculator.scratch[:6].amax(1)}

    for seed in range(3):
        compare(case, seed, "_ngram_scan_kernel", "_ngram_finalize_kernel")
    assert found or alphabet == 50


@pytest.mark.parametrize(
    "markers", [([1], [2], [2]), ([1, 1], [2], [0, 2, 2]), ([1], [2, 0], [0, 0, 2, 0])]
)
def test_thinking_budgets(markers: tuple[list[int], list[int], list[int]]) -> None:
    """Texts grow by steps with drafts. Markers are in prompts, outputs and drafts, and
    across them.
    """
    start, natural_end, end = markers
    forced = 0

    def case(generator: torch.Generator) -> Tensors:
        nonlocal forced
        tokens = integers(generator, 0, 3, ROWS, 3000)
        lengths = integers(generator, 1, 30, ROWS)
        lengths[3] = 2600
        states = SimpleNamespace(
            max_num_reqs=ROWS,
            device=CPU,
            all_token_ids=SimpleNamespace(gpu=tokens),
            total_len=SimpleNamespace(gpu=lengths),
        )
        config = SimpleNamespace(
            reasoning_start_token_ids=start,
            reasoning_end_token_ids=end,
            natural_reasoning_end_token_ids=natural_end,
        )
        state = ThinkingBudgetState(states, config)  # type: ignore[arg-type]
        for row, budget in enumerate([None, 0, 2, 3, 1, 5, 0]):
            state.add_request(row, SamplingParams(thinking_token_budget=budget))
        state.apply_staged_writes()
        numbers = torch.tensor([1, 4, 2, 1, 3])
        written = {}
        local = torch.cat(
            [torch.arange(number, dtype=torch.int32) for number in numbers.tolist()]
        )
        for step in range(4):
            rows = rows_of(generator, 5, ROWS)
            expanded = rows.repeat_interleave(numbers)
            logits = torch.zeros(11, 10)
            context = SimpleNamespace(
                idx_mapping=rows,
                idx_mapping_np=rows.numpy(),
                expanded_idx_mapping=expanded,
                input_ids=integers(generator, 0, 3, 11),
                expanded_local_pos=local,
            )
            state.apply(logits, context)  # type: ignore[arg-type]
            written[f"logits {step}"] = logits
            forced += int(logits.sum())
            if step == 2:  # what was counted on is taken back
                lengths[rows] -= integers(generator, 0, 9, 5)
                lengths.clamp_(min=1)
            else:
                lengths[rows] += integers(generator, 0, 4, 5)
        return written | {"scanned": state.cached_scan_pos}

    for seed in range(3):
        compare(
            case,
            seed,
            "_update_committed_marker_cache_kernel",
            "_thinking_budget_kernel",
        )
    assert forced


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_as_embeddings(dtype: torch.dtype) -> None:
    """Of whole prompts and chunks, with and without places that have a token ID, and
    none at all.
    """

    def case(generator: torch.Generator) -> Tensors:
        state = PromptEmbedsState(ROWS, 1030, dtype, CPU)
        length = 40
        rows = rows_of(generator, 5, ROWS)
        computed = torch.zeros(ROWS, dtype=torch.int32)
        for request, row in enumerate(rows.tolist()):
            embeds = torch.randn(length, 1030, generator=generator)
            mask = torch.rand(length, generator=generator) < 0.5
            data = SimpleNamespace(
                req_id=str(row),
                prompt_embeds=None if request == 1 else embeds,
                prompt_is_token_ids=mask.tolist() if request > 2 else None,
            )
            state.add_request(row, data)  # type: ignore[arg-type]
        state.apply_staged_writes()
        computed[rows] = torch.tensor([0, 0, 38, 10, 40], dtype=torch.int32)
        lengths = torch.tensor([40, 3, 4, 20, 1])
        inputs = torch.zeros(70, 1030, dtype=dtype)
        batch = SimpleNamespace(
            num_reqs=5,
            num_scheduled_tokens=lengths.numpy(),
            idx_mapping=rows,
            query_start_loc=starts_of(lengths, 2),
        )
        state.apply(batch, computed, inputs)  # type: ignore[arg-type]
        return {"inputs": inputs}

    compare(case, 0, "_apply_prompt_embeds_kernel")
