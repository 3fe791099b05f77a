# SPDX-License-Identifier: Apache-2.0
"""A step's inputs and the requests' tables after it: our kernels against vLLM's, to the bit."""

import inspect

import pytest
import torch
from both_ways import CPU, Tensors, compare, integers, rows_of, starts_of
from vllm.v1.worker.gpu import input_batch as module
from vllm.v1.worker.gpu.mm.rope import RopeState

ROWS = 9
LONGEST = 1300
K = 3


@pytest.mark.parametrize("lookahead", [1, 3])
def test_prefill_inputs(lookahead: int) -> None:
    """Whole prompts, chunks, the last tokens of a prompt, and decoding requests."""
    lengths = torch.tensor([5, 1100, 1, 8, 2])

    def case(generator: torch.Generator) -> Tensors:
        rows = rows_of(generator, 5, ROWS)
        computed = torch.full((ROWS,), 3, dtype=torch.int32)
        prefill = torch.full((ROWS,), 3, dtype=torch.int32)
        computed[rows] = torch.tensor([0, 100, 40, 0, 7], dtype=torch.int32)
        prefill[rows] = torch.tensor([5, 1250, 40, 10, 10], dtype=torch.int32)
        ids = torch.full((1200,), -7, dtype=torch.int32)
        upcoming = torch.full((lookahead, ROWS), -7, dtype=torch.int32)
        tokens = integers(generator, 1, 900, ROWS, LONGEST)
        module.prepare_prefill_inputs(
            ids, upcoming, rows, starts_of(lengths, 2), tokens, prefill, computed
        )
        return {"ids": ids, "next": upcoming}

    compare(case, lookahead, "_prepare_prefill_inputs_kernel")


@pytest.mark.parametrize("lengths", [[], [1, 1, 1], [1, 40, 4], [2, 0, 1]])
def test_positions_and_lengths(lengths: list[int]) -> None:
    def case(generator: torch.Generator) -> Tensors:
        positions = torch.full((60,), -7)
        seq_lens = torch.full((ROWS,), 5, dtype=torch.int32)
        rows = rows_of(generator, len(lengths), ROWS)
        computed = integers(generator, 0, 90, ROWS)
        starts = starts_of(
            torch.tensor(lengths, dtype=torch.int64), padding=ROWS - len(lengths)
        )
        module.prepare_pos_seq_lens(rows, starts, computed, positions, seq_lens)
        return {"positions": positions, "lengths": seq_lens}

    compare(case, len(lengths), "_prepare_pos_seq_lens_kernel")


@pytest.mark.parametrize("drafts", [[0, 0, 0, 0, 0], [3, 3, 3, 3, 3], [0, 3, 1, 0, 2]])
@pytest.mark.parametrize("new_tokens", [1, 0])
def test_sampled_and_draft_tokens(drafts: list[int], new_tokens: int) -> None:
    """Requests that decode, whose prompt ends or goes on, and whose drafts begin within it."""

    def case(generator: torch.Generator) -> Tensors:
        rows = rows_of(generator, 5, ROWS)
        counts = torch.tensor(drafts)
        lengths = counts + torch.tensor([1, 1, 4, 6, 3])
        computed = torch.tensor([50, 7, 20, 0, 9])
        seq_lens = torch.zeros(ROWS, dtype=torch.int32)
        seq_lens[:5] = computed + lengths
        prefill = integers(generator, 5, 7, ROWS)
        prefill[rows] = torch.tensor([50, 5, 24, 100, 11], dtype=torch.int32)
        ids = integers(generator, 0, 900, int(lengths.sum()) + 4)
        logits = starts_of(counts + new_tokens)
        indices = module.combine_sampled_and_draft_tokens(
            ids,
            rows,
            integers(generator, 0, 900, ROWS, 1, dtype=torch.int64),
            starts_of(lengths, 3),
            seq_lens,
            prefill,
            integers(generator, 900, 999, ROWS, K, dtype=torch.int64),
            logits,
            int(logits[-1]),
            new_tokens,
        )
        return {"ids": ids, "indices": indices}

    compare(case, sum(drafts), "_combine_sampled_and_draft_tokens_kernel")


def test_numbers_of_sampled_and_rejected_tokens() -> None:
    def case(generator: torch.Generator) -> Tensors:
        rows = rows_of(generator, 6, ROWS)
        seq_lens = integers(generator, 1, 20, ROWS)
        sampled = integers(generator, 1, 5, 6)
        logits = starts_of(sampled + integers(generator, 0, 3, 6))
        prefill = integers(generator, 1, 20, ROWS)
        return dict(
            zip(
                ("sampled", "rejected"),
                module.get_num_sampled_and_rejected(
                    sampled, seq_lens, logits, rows, prefill
                ),
                strict=True,
            )
        )

    compare(case, 0, "_get_num_sampled_and_rejected_kernel")


@pytest.mark.parametrize("numbers", [[], [1, 1, 1, 1], [1, 4, 0, 2], [0, 0]])
@pytest.mark.parametrize("kind", ["plain", "counts", "left out", "no queries"])
def test_tokens_after_a_step(numbers: list[int], kind: str) -> None:
    requests = len(numbers)

    def case(generator: torch.Generator) -> Tensors:
        rows = rows_of(generator, requests, ROWS)
        if kind == "left out":
            rows[: requests // 2] = -1
        written = {
            "computed": integers(generator, 1, 90, ROWS),
            "last": integers(generator, 0, 50, ROWS, 1, dtype=torch.int64),
            "counts": integers(generator, 0, 5, ROWS, 50),
            "tokens": integers(generator, 0, 50, ROWS, 120),
            "lengths": integers(generator, 1, 90, ROWS),
        }
        starts = starts_of(integers(generator, 1, 6, requests).long(), padding=2)
        sampled = integers(generator, 0, 9, requests, K + 1)  # the same token twice
        more = {}
        if (
            "draft_tokens" in inspect.signature(module.post_update).parameters
            and requests
        ):
            written["drafts"] = integers(generator, 0, 50, ROWS, K, dtype=torch.int64)
            more = {
                "draft_tokens": integers(
                    generator, 50, 99, requests, K, dtype=torch.int64
                )
            }
            more["draft_tokens_out"] = written["drafts"]
        module.post_update(
            rows,
            written["computed"],
            written["last"],
            written["counts"] if kind == "counts" else None,
            sampled,
            torch.tensor(numbers, dtype=torch.int32),
            integers(generator, 0, 3, requests),
            None if kind == "no queries" else starts,
            written["tokens"],
            written["lengths"],
            **more,
        )
        return written

    compare(case, requests, "_post_update_kernel")


def test_computed_tokens_of_a_stage_that_samples_none() -> None:
    def case(generator: torch.Generator) -> Tensors:
        computed = integers(generator, 0, 90, ROWS)
        rows = rows_of(generator, 5, ROWS)
        starts = starts_of(integers(generator, 1, 9, 5).long(), padding=2)
        module.post_update_num_computed_tokens(rows, computed, starts)
        return {"computed": computed}

    compare(case, 0, "_post_update_num_computed_tokens_kernel")


@pytest.mark.parametrize("numbers", [[1, 1, 1], [4, 1, 3, 2]])
def test_rows_of_logits(numbers: list[int]) -> None:
    def case(generator: torch.Generator) -> Tensors:
        rows = rows_of(generator, len(numbers), ROWS)
        starts = starts_of(torch.tensor(numbers))
        expanded, local = module.expand_idx_mapping(rows, sum(numbers), starts, K + 1)
        return {"rows": expanded, "local": local}

    compare(case, 0, "_expand_idx_mapping_kernel")


def test_positions_in_three_dimensions() -> None:
    def case(generator: torch.Generator) -> Tensors:
        state = RopeState(3, ROWS, 1300, LONGEST, CPU)
        state.prefill_positions.gpu.copy_(
            integers(generator, 0, 900, 3 * ROWS, LONGEST)
        )
        state.prefill_delta.gpu.copy_(integers(generator, -50, 50, ROWS))
        rows = rows_of(generator, 5, ROWS)
        prefill = torch.full((ROWS,), 30, dtype=torch.int32)
        computed = torch.full((ROWS,), 30, dtype=torch.int32)
        computed[rows] = torch.tensor([0, 25, 30, 90, 0], dtype=torch.int32)
        prefill[rows[4]] = 1200
        starts = starts_of(torch.tensor([30, 3, 1, 4, 1100]), padding=2)
        state.prepare_positions(rows, starts, prefill, computed)
        return {"positions": state.positions}

    compare(case, 0, "_prepare_rope_positions_kernel")
