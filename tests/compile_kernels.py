# SPDX-License-Identifier: Apache-2.0
"""Compiles every Triton kernel for a GPU that need not be there, and launches none; run
as a script by test_triton.py.

What the interpreter takes and the compiler does not (outside names, types that change
in a branch) fails here.
"""

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vllm_ppd.kernels import (
    answers_triton,
    cp_mixture_triton,
    joint_triton,
    lookup_triton,
    sampling_triton,
    staging_triton,
)
from vllm_ppd.kernels.answers import Kept, Verified
from vllm_ppd.kernels.joint import Ngrams, Top
from vllm_ppd.kernels.lookup import Texts
from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.kernels.staging import Staged, StepEnd

# Bytes a program has on the smallest GPUs that vLLM serves on (compute capability 8.6
# and 8.9)
MOST_SHARED = 99 << 10


class Target:
    """As much of Triton's driver as compiling asks for."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    variants: set[tuple[str, str]] = (
        set()
    )  # of the code, one a kernel and specialization
    launch = JITFunction.run

    def compile_only(
        self: Any, *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        kernel = launch(
            self,
            *args,
            grid=grid,
            warmup=True,
            **options,
        )
        assert "cubin" in kernel.asm, self.__name__
        assert kernel.metadata.shared <= MOST_SHARED, self.__name__
        variants.add((self.__name__, kernel.hash))

    driver.set_active(Target())
    JITFunction.run = compile_only
    serve(2)
    joint(2, 3, None)
    # One code for every batch size of a bucket, and for every position of a chain: what
    # is warmed up serves them all.
    known = set(variants)
    for requests in (3, 16):
        serve(requests)
    assert variants == known, (
        f"compiled while serving: {sorted(variants - known)}"
    )
    mixes = cp_mixture_triton._mix.device_caches[0][0].values()
    assert len(mixes) == 2, (
        "not one variant of a chain's positions, greedy and sampled"
    )
    print(*{name for name, _ in variants})


def sampling_of(requests: int) -> Sampling:
    """As runner V2 samples."""
    seeds = torch.zeros(requests, dtype=torch.int64)
    return Sampling(*torch.ones(3, 1024)[:, :requests], seeds, seeds)


def serve(requests: int) -> None:
    """Draft, verify and stage for so many requests."""
    logits = torch.zeros(
        requests,
        4,
        3,
        5000,
        dtype=torch.bfloat16,
    )
    weights = torch.zeros(requests, 3)
    places = torch.zeros(requests, dtype=torch.int64)
    token_ids = torch.arange(5000)
    sampling = sampling_of(requests)
    for how in (None, sampling):
        cp_mixture_triton.draft_chain(
            weights,
            logits,
            places,
            how,
            token_ids,
        )
    sampling_triton.draw_rows(torch.zeros(requests, 5000), sampling, token_ids)
    joint(requests, 2, places)
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    numbers = starts[:-1]
    hidden = torch.zeros(requests, 4096, dtype=torch.bfloat16)
    settings = torch.zeros(6, 1024)
    staged = Staged(
        places,
        places,
        places,
        places,
        hidden,
        settings,
        places,
    )
    end = StepEnd(
        numbers, starts, numbers, numbers, places[:, None], places, hidden, places
    )
    staging_triton.stage(
        end,
        torch.zeros(1025, 5),
        staged,
        requests,
    )
    sampling_triton.accept_drawn(
        places,
        places.int(),
        starts,
        4,
    )
    texts = Texts(torch.zeros(9, 4096, dtype=torch.int32), torch.zeros(9).int())
    found = torch.zeros(requests, 5, dtype=torch.int64)
    lookup_triton.look_up(
        texts,
        places,
        2,
        8,
        32768,
        numbers,
        found,
    )
    drafts = torch.zeros(requests, 11, dtype=torch.int64)
    lookup_triton.judge(texts, places, drafts, numbers, drafts, numbers)
    states = torch.zeros(9, 2, 4096, dtype=torch.bfloat16)
    rows = torch.zeros(9, dtype=torch.int64)
    kept = Kept(states, rows, rows, rows, states, rows[:, None])
    step = Verified(numbers, starts, numbers, numbers, places, hidden)
    answers_triton.collect(step, texts, kept, 1)


def joint(requests: int, heads: int, first: torch.Tensor | None) -> None:
    """Choose n-grams for so many requests, with a mask and without one, and draw some."""
    scores = torch.zeros(heads, requests, 50)
    top = Top(scores, scores.long(), first)
    ngrams = Ngrams(
        torch.arange(9), torch.zeros(9), torch.arange(4), (0, 3, 6, 9), 1000, 1000
    )
    some = ngrams._replace(columns=torch.zeros(1000, dtype=torch.int64))
    for table, with_joints in (
        (ngrams, False),
        (some, False),
        (None, True),
        (ngrams, True),
    ):
        peaks, joints = joint_triton.find_peaks(top, table, with_joints)
    likeliest = joint_triton.back_off(
        peaks,
        top,
        torch.zeros(requests),
    )
    joint_triton.draw_ngrams(joints, likeliest, top, sampling_of(requests))


if __name__ == "__main__":
    main()
