# SPDX-License-Identifier: Apache-2.0
"""A step's inputs and the requests' tables after it: our kernels against vLLM's, to the bit."""

import inspect

import pytest
import torch
from both_ways import CPU, ROWS, both_ways, ints, rows_of, starts_of, table
from vllm.v1.worker.gpu import input_batch as module
from vllm.v1.worker.gpu.mm.rope import RopeState

LONGEST = 1300
K = 3


@pytest.mark.parametrize("lookahead", [1, 3])
@both_ways("_prepare_prefill_inputs_kernel")
def test_prefill_inputs(lookahead):
    """Whole prompts, chunks, the last tokens of a prompt, and decoding requests."""
    rows = rows_of(5)
    computed = table(3, rows, [0, 100, 40, 0, 7])
    prefill = table(3, rows, [5, 1250, 40, 10, 10])
    ids = torch.full((1200,), -7, dtype=torch.int32)
    upcoming = torch.full((lookahead, ROWS), -7, dtype=torch.int32)
    starts = starts_of([5, 1100, 1, 8, 2], 2)
    tokens = ints(
        1,
        900,
        ROWS,
        LONGEST,
    )
    module.prepare_prefill_inputs(
        ids, upcoming, rows, starts, tokens, prefill, computed
    )
    return ids, upcoming


@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [1, 1, 1],
        [1, 40, 4],
        [2, 0, 1],
    ],
)
@both_ways("_prepare_pos_seq_lens_kernel")
def test_positions_and_lengths(lengths):
    positions = torch.full((60,), -7)
    seq_lens = ints(5, 6, ROWS)
    starts = starts_of(lengths, ROWS - len(lengths))
    module.prepare_pos_seq_lens(
        rows_of(len(lengths)), starts, ints(0, 90, ROWS), positions, seq_lens
    )
    return positions, seq_lens


@pytest.mark.parametrize(
    "drafts",
    [
        [0, 0, 0, 0, 0],
        [3, 3, 3, 3, 3],
        [0, 3, 1, 0, 2],
    ],
)
@pytest.mark.parametrize("new_tokens", [1, 0])
@both_ways("_combine_sampled_and_draft_tokens_kernel")
def test_sampled_and_draft_tokens(drafts, new_tokens):
    """Requests that decode, whose prompt ends or goes on, and whose drafts begin within it."""
    rows = rows_of(5)
    counts = torch.tensor(drafts)
    lengths = counts + torch.tensor([1, 1, 4, 6, 3])
    seq_lens = torch.tensor([50, 7, 20, 0, 9]) + lengths
    ids = ints(0, 900, int(lengths.sum()) + 4)
    logits = starts_of(counts + new_tokens)
    indices = module.combine_sampled_and_draft_tokens(
        ids,
        rows,
        torch.randint(0, 900, (ROWS, 1)),
        starts_of(lengths, 3),
        seq_lens.int(),
        table(6, rows, [50, 5, 24, 100, 11]),
        torch.randint(900, 999, (ROWS, K)),
        logits,
        int(logits[-1]),
        new_tokens,
    )
    return ids, indices


@both_ways("_get_num_sampled_and_rejected_kernel")
def test_numbers_of_sampled_and_rejected_tokens():
    sampled = ints(1, 5, 6)
    return module.get_num_sampled_and_rejected(
        sampled,
        ints(1, 20, ROWS),
        starts_of(sampled + ints(0, 3, 6)),
        rows_of(6),
        ints(1, 20, ROWS),
    )


@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [1, 1, 1, 1],
        [1, 4, 0, 2],
        [0, 0],
    ],
)
@pytest.mark.parametrize("kind", ["plain", "counts", "left out", "no queries"])
@both_ways("_post_update_kernel")
def test_tokens_after_a_step(numbers, kind):
    requests = len(numbers)
    rows = rows_of(requests)
    if kind == "left out":
        rows[: requests // 2] = -1
    computed = ints(1, 90, ROWS)
    last = torch.randint(0, 50, (ROWS, 1))
    counts = (
        ints(
            0,
            5,
            ROWS,
            50,
        )
        if kind == "counts"
        else None
    )
    tokens = ints(
        0,
        50,
        ROWS,
        120,
    )
    lengths = ints(1, 90, ROWS)
    written = [computed, last, tokens, lengths]
    starts = starts_of(ints(1, 6, requests), 2)
    more = {}
    if (
        "draft_tokens" in inspect.signature(module.post_update).parameters
        and requests
    ):
        written.append(torch.randint(0, 50, (ROWS, K)))
        more = {
            "draft_tokens": torch.randint(50, 99, (requests, K)),
            "draft_tokens_out": written[-1],
        }
    module.post_update(
        rows,
        computed,
        last,
        counts,
        ints(
            0,
            9,
            requests,
            K + 1,
        ),  # the same token twice
        torch.tensor(numbers, dtype=torch.int32),
        ints(0, 3, requests),
        None if kind == "no queries" else starts,
        tokens,
        lengths,
        **more,
    )
    return written if counts is None else [*written, counts]


@both_ways("_post_update_num_computed_tokens_kernel")
def test_computed_tokens_of_a_stage_that_samples_none():
    computed = ints(0, 90, ROWS)
    starts = starts_of(ints(1, 9, 5), 2)
    module.post_update_num_computed_tokens(rows_of(5), computed, starts)
    return computed


@pytest.mark.parametrize("numbers", [[1, 1, 1], [4, 1, 3, 2]])
@both_ways("_expand_idx_mapping_kernel")
def test_rows_of_logits(numbers):
    rows = rows_of(len(numbers))
    return module.expand_idx_mapping(
        rows, sum(numbers), starts_of(numbers), K + 1
    )


@both_ways("_prepare_rope_positions_kernel")
def test_positions_in_three_dimensions():
    state = RopeState(
        3,
        ROWS,
        LONGEST,
        LONGEST,
        CPU,
    )
    state.prefill_positions.gpu.copy_(
        ints(
            0,
            900,
            3 * ROWS,
            LONGEST,
        )
    )
    state.prefill_delta.gpu.copy_(ints(-50, 50, ROWS))
    rows = rows_of(5)
    prefill = table(30, rows[4:], [1200])
    computed = table(30, rows, [0, 25, 30, 90, 0])
    starts = starts_of([30, 3, 1, 4, 1100], 2)
    state.prepare_positions(
        rows,
        starts,
        prefill,
        computed,
    )
    return state.positions
