# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters and draws: our kernels against vLLM's, over requests with drafts."""

import numpy as np
import pytest
import torch
from both_ways import ROWS, both_ways, ints, places_of, rows_of, starts_of, table
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample import (
    bad_words,
    gumbel,
    logit_bias,
    min_p,
    penalties,
)
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

from vllm_ppd.vllm_plugins.engine.cpu import sampling as ours

V = 2500
NUMBERS = torch.tensor([1, 4, 2, 1])  # rows of logits by request
PLACES = places_of(NUMBERS)


def logits_of(rows=8):
    logits = 4 * torch.randn(rows, V)
    logits[0, 5:9] = -torch.inf
    return logits


def expanded_rows():
    """The request row of each row of logits."""
    return rows_of(len(NUMBERS)).repeat_interleave(NUMBERS)


def by_row(*values):
    """A parameter of each request row, some of them repeated."""
    return torch.tensor(values).repeat(2)[:ROWS]


@both_ways("_temperature_kernel")
def test_temperature():
    logits = logits_of()
    temperatures = by_row(
        0.0,
        1.0,
        0.7,
        1.3,
        0.01,
        0.0,
        2.0,
    )
    gumbel.apply_temperature(logits, expanded_rows(), temperatures)
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precise", [False, True])
@both_ways("_gumbel_sample_kernel")
def test_draws(dtype, precise):
    """Flat and peaked rows, equal logits, rows with one token left or none, padding,
    greedy requests.
    """
    logits = (6 * torch.rand(24, 1) * torch.randn(24, V)).to(dtype)
    logits[0] = 0.0
    logits[1] = -torch.inf
    logits[2, 1:] = -torch.inf
    logits[3, 30:] = -torch.inf
    rows = torch.randint(0, ROWS, (24,))
    rows[5] = -1
    return gumbel.gumbel_sample(
        logits,
        rows,
        by_row(
            0.0,
            1.0,
            0.7,
            1.3,
            1.0,
            0.2,
            5.0,
        ),
        torch.randint(-(1 << 62), 1 << 62, (ROWS,)),
        torch.randint(0, 1 << 20, (24,)),
        is_drafting=False,
        apply_temperature=False,
        use_fp64=precise,
    )


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_no_token_is_left_out_that_wins(spread):
    """Of many candidates, only those are compared whose random bits let them win."""
    values = (torch.randn(16 * V) * spread).numpy()
    best = values.argmax()
    for position in range(150):
        noise = ours.noise_32(7, position, slice(None), len(values))
        candidates = ours.contenders(values, best, 7, position)
        assert (values + noise).argmax() in candidates
        assert len(candidates) < len(values) / 9


def test_noise_is_within_the_range_of_which_draws_are_made(monkeypatch):
    ends = np.array([0, 0xFFFFFFFF], dtype=np.uint32)
    monkeypatch.setattr(ours, "hashes", lambda *_: ends.copy())
    for noise, most in (
        (ours.noise_32, ours.RANGE_32),
        (ours.noise_64, ours.RANGE_53),
    ):
        least, greatest = sorted(
            noise(
                0,
                0,
                ends,
                2,
            ).astype(float)
        )
        assert most - 1 < greatest - least < most


@both_ways("_min_p_kernel")
def test_min_p():
    logits = logits_of()
    shares = by_row(
        0.0,
        0.1,
        0.5,
        1.0,
        0.0,
        0.02,
        0.9,
    )
    min_p.apply_min_p(logits, expanded_rows(), shares)
    return logits


@both_ways("_bincount_kernel")
def test_penalties_of_new_requests():
    """A request that was preempted has output of its own in what it prefills."""
    rows = rows_of(4)
    tokens = ints(
        0,
        V,
        ROWS,
        2300,
    )
    tokens[rows[0], 1110:1120] = 31
    prompts = table(20, rows[:3], [1100, 3, 40])
    prefill = table(20, rows[:3], [2200, 3, 70])
    mask = ints(
        -9,
        9,
        ROWS,
        -(-V // 32),
    )
    counts = ints(
        0,
        9,
        ROWS,
        V,
    )
    penalties.bincount(
        rows,
        tokens,
        prompts,
        prefill,
        mask,
        counts,
        2200,
    )
    return mask, counts


@both_ways("_penalties_kernel", atol=1e-6)
def test_penalties():
    logits = logits_of()
    penalties.apply_penalties(
        logits,
        expanded_rows(),
        ints(0, V, 8),
        PLACES,
        by_row(
            1.0,
            1.0,
            1.0,
            1.3,
            0.7,
            1.1,
            1.0,
        ),
        by_row(
            0.0,
            0.0,
            0.5,
            0.0,
            -0.3,
            0.2,
            1.0,
        ),
        by_row(
            0.0,
            0.7,
            0.5,
            0.0,
            0.0,
            0.2,
            0.0,
        ),
        ints(
            -(1 << 31),
            1 << 31,
            ROWS,
            -(-V // 32),
        ),
        ints(
            -396,
            4,
            ROWS,
            V,
        ).clamp(min=0),
    )
    return logits


@pytest.mark.parametrize("restore", [True, False])
@both_ways("_bias_kernel")
def test_logit_bias(restore):
    """Allowed tokens, biases, ends that come too early: alone, together, and with
    nothing else left.
    """
    logits = logits_of()
    rows = expanded_rows()
    last = rows[-1]
    ids = torch.rand(ROWS, V).argsort(dim=1)[:, :40].int()
    stops = ids[:, :20].contiguous()
    logits[-1] = -torch.inf
    logits[-1, stops[last, :3]] = torch.tensor([1.0, torch.inf, -torch.inf])
    number = by_row(
        0,
        40,
        0,
        7,
        0,
        40,
        3,
    ).int()
    number[last] = 0
    stop_numbers = by_row(
        0,
        0,
        3,
        20,
        1,
        3,
        0,
    ).int()
    stop_numbers[last] = 3
    logit_bias.apply_logit_bias(
        logits,
        rows,
        torch.randint(0, 30, (8,)),
        number,
        ids,
        number.flip(0),
        ids.flip(1),
        torch.randn(ROWS, 40),
        ints(40, 41, ROWS),
        stop_numbers,
        ints(1, 2, ROWS),
        stops,
        restore,
    )
    return logits


@both_ways("_bad_words_kernel", seeds=4)
def test_bad_words():
    """Words of one to four tokens that end in the output, in the drafts, and across both."""
    logits = torch.zeros(8, V)
    bad_words.apply_bad_words(
        logits,
        expanded_rows(),
        ints(
            0,
            2,
            ROWS,
            40,
        ),
        torch.tensor([0, 1, 3, 6, 10, 14, 16], dtype=torch.int32).repeat(ROWS, 1),
        by_row(
            6,
            6,
            0,
            6,
            2,
            6,
            6,
        ).int(),
        ints(
            0,
            2,
            ROWS,
            90,
        ),
        ints(30, 31, ROWS),
        by_row(
            30,
            31,
            40,
            50,
            32,
            33,
            60,
        ).int(),
        ints(0, 2, 8),
        PLACES,
        max_num_bad_words=6,
    )
    assert logits.isinf().any()
    return logits


@pytest.mark.parametrize("sampled", [[1, 1, 1, 1], [1, 2, 2, 0]])
@both_ways("_compact_sampling_mask_kernel")
def test_what_tokens_were_drawn_from(sampled):
    slots = 1 if 0 not in sampled else 4
    numbers = NUMBERS if slots > 1 else torch.ones(4, dtype=torch.int64)
    logits = logits_of(int(numbers.sum()))
    logits[torch.rand(logits.shape) < 0.99] = -torch.inf
    logits[0] = 1.0
    drawn = torch.tensor(sampled, dtype=torch.int32)
    masks = SamplingMaskTensors.from_logits(
        logits, starts_of(numbers), drawn, 12, slots
    )
    kept = torch.arange(masks.token_ids.shape[1]) < masks.counts[:, None]
    written = (torch.arange(slots) < drawn[:, None]).view(-1)
    ids = masks.token_ids.where(kept, -1)
    return ids, masks.packed_mask[written], masks.counts


@both_ways("_num_nans_kernel")
def test_numbers_of_nans():
    logits = logits_of()
    logits[torch.rand(logits.shape) < 0.3] = torch.nan
    return get_num_nans(logits)
