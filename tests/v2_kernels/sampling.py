# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters and draws: our kernels against vLLM's, over requests with drafts."""

import numpy as np
import pytest
import torch
from both_ways import Tensors, compare, integers, rows_of, starts_of
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample import bad_words, gumbel, logit_bias, min_p, penalties
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors
from vllm.v1.worker.gpu.sample.trace_replay import apply_trace_tokens

from vllm_ppd.vllm_plugins.engine.cpu.kernels.gumbel import (
    RANGE_32,
    RANGE_53,
    noise_32,
    noise_64,
)

ROWS = 7
V = 2500
LONGEST = 90
NUMBERS = torch.tensor([1, 4, 2, 1])  # rows of logits by request


def logits_of(
    generator: torch.Generator, rows: int = int(NUMBERS.sum())
) -> torch.Tensor:
    logits = 4 * torch.randn(rows, V, generator=generator)
    logits[0, 5:9] = -torch.inf
    return logits


def expanded(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(request row, index among the request's) of each row of logits."""
    rows = rows_of(generator, len(NUMBERS), ROWS)
    local = torch.cat(
        [torch.arange(number, dtype=torch.int32) for number in NUMBERS.tolist()]
    )
    return rows.repeat_interleave(NUMBERS), local


def test_temperature() -> None:
    def case(generator: torch.Generator) -> Tensors:
        logits = logits_of(generator)
        temperatures = torch.tensor([0.0, 1.0, 0.7, 1.3, 0.01, 0.0, 2.0])
        gumbel.apply_temperature(logits, expanded(generator)[0], temperatures)
        return {"logits": logits}

    compare(case, 0, "_temperature_kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize(("drafting", "by_temperature"), [(False, False), (True, True)])
def test_draws(
    dtype: torch.dtype, precise: bool, drafting: bool, by_temperature: bool
) -> None:
    """Flat and peaked rows, equal logits, rows with one token left or none, padding,
    greedy requests.
    """

    def case(generator: torch.Generator) -> Tensors:
        scales = torch.rand(24, 1, generator=generator) * 6
        logits = (scales * torch.randn(24, V, generator=generator)).to(dtype)
        logits[0] = 0.0
        logits[1] = -torch.inf
        logits[2, 1:] = -torch.inf
        logits[3, 30:] = -torch.inf
        rows = integers(generator, 0, ROWS, 24, dtype=torch.int64)
        rows[5] = -1
        temperatures = torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 0.2, 5.0])
        seeds = torch.randint(-(1 << 62), 1 << 62, (ROWS,), generator=generator)
        positions = integers(generator, 0, 1 << 20, 24, dtype=torch.int64)
        drawn = gumbel.gumbel_sample(
            logits,
            rows,
            temperatures,
            seeds,
            positions,
            by_temperature,
            drafting,
            use_fp64=precise,
        )
        return {"drawn": drawn}

    compare(case, 2 * precise + drafting, "_gumbel_sample_kernel")


def test_noise_is_within_the_range_of_which_draws_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_ppd.vllm_plugins.engine.cpu.kernels import gumbel as ours

    ends = np.array([0, 0xFFFFFFFF], dtype=np.uint32)
    monkeypatch.setattr(ours, "hashes", lambda *_: ends.copy())
    for noise, most in ((noise_32, RANGE_32), (noise_64, RANGE_53)):
        values = noise(0, 0, ends, 2)
        assert (
            np.isfinite(values).all()
            and most - 1 < abs(np.diff(values.astype(float)))[0] < most
        )


def test_min_p() -> None:
    def case(generator: torch.Generator) -> Tensors:
        logits = logits_of(generator)
        values = torch.tensor([0.0, 0.1, 0.5, 1.0, 0.0, 0.02, 0.9])
        min_p.apply_min_p(logits, expanded(generator)[0], values)
        return {"logits": logits}

    compare(case, 0, "_min_p_kernel")


def test_penalties_of_new_requests() -> None:
    """A request that was preempted has output of its own in what it prefills."""

    def case(generator: torch.Generator) -> Tensors:
        rows = rows_of(generator, 4, ROWS)
        tokens = integers(generator, 0, V, ROWS, 2300)
        prompts = torch.full((ROWS,), 20, dtype=torch.int32)
        prefill = torch.full((ROWS,), 20, dtype=torch.int32)
        prompts[rows[:3]] = torch.tensor([1100, 3, 40], dtype=torch.int32)
        prefill[rows[:3]] = torch.tensor([2200, 3, 70], dtype=torch.int32)
        tokens[rows[0], 1110:1120] = 31
        mask = integers(generator, -9, 9, ROWS, -(-V // 32))
        counts = integers(generator, 0, 9, ROWS, V)
        penalties.bincount(rows, tokens, prompts, prefill, mask, counts, 2200)
        return {"mask": mask, "counts": counts}

    compare(case, 0, "_bincount_kernel")


@pytest.mark.parametrize("drafts", [True, False])
def test_penalties(drafts: bool) -> None:
    def case(generator: torch.Generator) -> Tensors:
        logits = logits_of(generator)
        rows, local = expanded(generator)
        local = local if drafts else torch.zeros_like(local)
        counts = integers(generator, 0, 400, ROWS, V).sub_(396).clamp_(min=0)
        mask = integers(generator, -(1 << 31), 1 << 31, ROWS, -(-V // 32))
        penalties.apply_penalties(
            logits,
            rows,
            integers(generator, 0, V, len(rows)),
            local,
            torch.tensor([1.0, 1.0, 1.0, 1.3, 0.7, 1.1, 1.0]),
            torch.tensor([0.0, 0.0, 0.5, 0.0, -0.3, 0.2, 1.0]),
            torch.tensor([0.0, 0.7, 0.5, 0.0, 0.0, 0.2, 0.0]),
            mask,
            counts,
        )
        return {"logits": logits}

    compare(case, int(drafts), "_penalties_kernel", atol=1e-6)


@pytest.mark.parametrize("restore", [True, False])
def test_logit_bias(restore: bool) -> None:
    """Allowed tokens, biases, ends that come too early: alone, together, and with
    nothing else left.
    """

    def case(generator: torch.Generator) -> Tensors:
        logits = logits_of(generator)
        rows, _ = expanded(generator)
        ids = torch.stack(
            [torch.randperm(V, generator=generator)[:40].int() for _ in range(ROWS)]
        )
        stops = ids[:, :20].contiguous()
        logits[-1].fill_(-torch.inf)[stops[rows[-1], :3].long()] = torch.tensor(
            [1.0, torch.inf, -torch.inf]
        )
        number = torch.tensor([0, 40, 0, 7, 0, 40, 3], dtype=torch.int32)
        number[rows[-1]] = 0
        stop_numbers = torch.tensor([0, 0, 3, 20, 1, 3, 0], dtype=torch.int32)
        stop_numbers[rows[-1]] = 3
        logit_bias.apply_logit_bias(
            logits,
            rows,
            integers(generator, 0, 30, len(rows), dtype=torch.int64),
            number,
            ids,
            number.flip(0),
            ids.flip(1),
            torch.randn(ROWS, 40, generator=generator),
            torch.full((ROWS,), 40, dtype=torch.int32),
            stop_numbers,
            torch.ones(ROWS, dtype=torch.int32),
            stops,
            restore,
        )
        return {"logits": logits}

    compare(case, 0, "_bias_kernel")


def test_bad_words() -> None:
    """Words of one to four tokens that end in the output, in the drafts, and across both."""
    drafted = 0

    def case(generator: torch.Generator) -> Tensors:
        nonlocal drafted
        rows, local = expanded(generator)
        logits = torch.zeros(len(rows), V)
        tokens = integers(generator, 0, 2, ROWS, LONGEST)
        inputs = integers(generator, 0, 2, len(rows))
        words = integers(generator, 0, 2, ROWS, 40)
        offsets = torch.tensor([0, 1, 3, 6, 10, 14, 16], dtype=torch.int32).repeat(
            ROWS, 1
        )
        numbers = torch.tensor([6, 6, 0, 6, 2, 6, 6], dtype=torch.int32)
        prompts = torch.full((ROWS,), 30, dtype=torch.int32)
        totals = torch.tensor([30, 31, 40, 50, 32, 33, 60], dtype=torch.int32)
        bad_words.apply_bad_words(
            logits,
            rows,
            words,
            offsets,
            numbers,
            tokens,
            prompts,
            totals,
            inputs,
            local,
            max_num_bad_words=6,
        )
        drafted += int(logits.isinf().sum())
        return {"logits": logits}

    for seed in range(4):
        compare(case, seed, "_bad_words_kernel")
    assert drafted


def test_traces() -> None:
    def case(generator: torch.Generator) -> Tensors:
        rows = torch.tensor([3, -1, 0, 6, 2])
        sampled = torch.full((5,), -7)
        lengths = torch.tensor([0, 5, 5, 9, 5, 5, 3], dtype=torch.int32)
        totals = integers(generator, 10, 14, ROWS)
        prompts = torch.full((ROWS,), 10, dtype=torch.int32)
        apply_trace_tokens(
            sampled,
            rows,
            integers(generator, 0, V, ROWS, LONGEST),
            lengths,
            totals,
            prompts,
        )
        return {"sampled": sampled}

    for seed in range(3):
        compare(case, seed, "_trace_replay_kernel")


@pytest.mark.parametrize("slots", [1, 4])
def test_what_tokens_were_drawn_from(slots: int) -> None:
    def case(generator: torch.Generator) -> Tensors:
        numbers = NUMBERS if slots > 1 else torch.ones(4, dtype=torch.int64)
        logits = logits_of(generator, int(numbers.sum()))
        logits[torch.rand(logits.shape, generator=generator) < 0.99] = -torch.inf
        logits[0] = 1.0
        sampled = numbers.int()
        if slots > 1:
            sampled -= torch.tensor([0, 2, 0, 1], dtype=torch.int32)
        masks = SamplingMaskTensors.from_logits(
            logits, starts_of(numbers), sampled, 12, slots
        )
        kept = torch.arange(masks.token_ids.shape[1]) < masks.counts[:, None]
        drawn = torch.arange(slots) < sampled[:, None]
        packed = masks.packed_mask.where(
            drawn.view(-1, 1), torch.zeros((), dtype=torch.uint8)
        )
        return {
            "ids": masks.token_ids.where(kept, -1),
            "mask": packed,
            "counts": masks.counts,
        }

    compare(case, slots, "_compact_sampling_mask_kernel")


def test_numbers_of_nans() -> None:
    def case(generator: torch.Generator) -> Tensors:
        logits = logits_of(generator)
        logits[torch.rand(logits.shape, generator=generator) < 0.3] = torch.nan
        return {"numbers": get_num_nans(logits)}

    compare(case, 0, "_num_nans_kernel")
