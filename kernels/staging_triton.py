# SPDX-License-Identifier: Apache-2.0
"""Staging in one launch, a program per place; torch needs some twenty operations, each
of which costs host time.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm_ppd.kernels.staging import Staged, StepEnd

BLOCK = tl.constexpr(1024)  # elements of a hidden state at a time


@triton.jit(do_not_specialize=["requests"])
def _stage(
    end: StepEnd,
    settings,  # [request rows + 1, SETTINGS]
    staged: Staged,
    last_stride,
    hidden_stride,
    settings_stride,
    requests,
    size,  # elements of a hidden state
    COLUMNS: tl.constexpr,
    SETTINGS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    if place >= requests:
        tl.store(staged.rows + place, -1)
        tl.store(staged.positions + place, 0)
    else:
        row = tl.load(end.rows + place).to(tl.int64)
        next_start = tl.load(end.query_starts + place + 1).to(tl.int64)
        token = next_start - 1 - tl.load(end.num_rejected + place)
        emits = tl.load(end.num_sampled + place) > 0
        newest = tl.load(end.last_sampled + row * last_stride)
        position = tl.load(end.positions + token) + 1
        tl.store(staged.rows + place, tl.where(emits, row, -1))
        tl.store(staged.newest_ids + place, newest)
        tl.store(staged.places + place, token)
        tl.store(staged.positions + place, position * emits)
        tl.store(staged.seeds + place, tl.load(end.seeds + row))
        setting = tl.arange(0, COLUMNS)
        real = setting < SETTINGS
        values = tl.load(
            settings + row * SETTINGS + setting, mask=real, other=0.0
        )
        columns = staged.settings + setting * settings_stride
        tl.store(columns + place, values, mask=real)
        for start in range(0, size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < size
            state = tl.load(
                end.hidden + token * hidden_stride + column,
                mask=inside,
                other=0.0,
            )
            tl.store(staged.hidden + place * size + column, state, mask=inside)


def stage(end: StepEnd, settings: Tensor, staged: Staged, padded: int) -> None:
    """Same as the reference."""
    columns = settings.shape[1]
    _stage[(padded,)](
        end,
        settings,
        staged,
        end.last_sampled.stride(0),
        end.hidden.stride(0),
        staged.settings.stride(0),
        len(end.rows),
        staged.hidden.shape[1],
        COLUMNS=triton.next_power_of_2(columns),
        SETTINGS=columns,
    )
