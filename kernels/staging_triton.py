# SPDX-License-Identifier: Apache-2.0
"""Staging in one launch, a program per place; torch needs some twenty operations, each
of which costs host time.
"""

import torch
import triton
import triton.language as tl

from vllm_ppd.kernels.staging import Staged, StepEnd

BLOCK_H = 1024  # elements of a hidden state at a time


@triton.jit(do_not_specialize=["requests"])
def _stage(
    rows: tl.tensor,
    query_starts: tl.tensor,
    num_sampled: tl.tensor,
    num_rejected: tl.tensor,
    last_sampled: tl.tensor,
    last_stride: tl.tensor,
    positions: tl.tensor,
    hidden: tl.tensor,
    hidden_stride: tl.tensor,
    settings: tl.tensor,
    seeds: tl.tensor,
    staged_rows: tl.tensor,
    staged_ids: tl.tensor,
    staged_places: tl.tensor,
    staged_positions: tl.tensor,
    staged_hidden: tl.tensor,
    staged_settings: tl.tensor,
    settings_stride: tl.tensor,
    staged_seeds: tl.tensor,
    requests: tl.tensor,
    size: tl.tensor,
    COLUMNS: tl.constexpr,
    SETTINGS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    if place >= requests:
        tl.store(staged_rows + place, -1)
    else:
        row = tl.load(rows + place).to(tl.int64)
        token = (
            tl.load(query_starts + place + 1).to(tl.int64)
            - 1
            - tl.load(num_rejected + place)
        )
        tl.store(
            staged_rows + place, tl.where(tl.load(num_sampled + place) > 0, row, -1)
        )
        tl.store(
            staged_ids + place, tl.load(last_sampled + row * last_stride).to(tl.int64)
        )
        tl.store(staged_places + place, token)
        tl.store(staged_positions + place, tl.load(positions + token).to(tl.int64) + 1)
        tl.store(staged_seeds + place, tl.load(seeds + row))
        setting = tl.arange(0, COLUMNS)
        values = tl.load(
            settings + row * SETTINGS + setting, mask=setting < SETTINGS, other=0.0
        )
        tl.store(
            staged_settings + setting * settings_stride + place,
            values,
            mask=setting < SETTINGS,
        )
        for start in range(0, size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            state = tl.load(
                hidden + token * hidden_stride + column, mask=column < size, other=0.0
            )
            tl.store(staged_hidden + place * size + column, state, mask=column < size)


def stage(end: StepEnd, settings: torch.Tensor, staged: Staged, padded: int) -> None:
    """Same as the reference."""
    columns = settings.shape[1]
    _stage[(padded,)](
        end.rows,
        end.query_starts,
        end.num_sampled,
        end.num_rejected,
        end.last_sampled,
        end.last_sampled.stride(0),
        end.positions,
        end.hidden,
        end.hidden.stride(0),
        settings,
        end.seeds,
        staged.rows,
        staged.newest_ids,
        staged.places,
        staged.positions,
        staged.hidden,
        staged.settings,
        staged.settings.stride(0),
        staged.seeds,
        len(end.rows),
        staged.hidden.shape[1],
        COLUMNS=triton.next_power_of_2(columns),
        SETTINGS=columns,
        BLOCK=BLOCK_H,
    )
