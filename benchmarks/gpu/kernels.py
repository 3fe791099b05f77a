# SPDX-License-Identifier: Apache-2.0
"""Times of the drafting kernels and of their torch references.

    # Vocabulary 128K
    python -m vllm_ppd.benchmarks.gpu.kernels --out kernels.json
    # small, references only
    python -m vllm_ppd.benchmarks.gpu.kernels --cpu --out kernels.json

Times are microseconds: medians of triton.testing.do_bench, which empties the cache
before each call, with a launch, as in a server without CUDA graphs around it. A kernel
pays where it takes at most 80 % of torch's time.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm_ppd.benchmarks.report import rows_table
from vllm_ppd.heads.files import write_json
from vllm_ppd.heads.provenance import provenance
from vllm_ppd.kernels.cp_mixture import draft_chain
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.joint import Top, back_off, draw_ngrams, find_peaks
from vllm_ppd.kernels.sampling import UNLIMITED, Sampling

PAYS = 0.8  # share of torch's time
BATCHES = (1, 2, 4, 8, 16, 32, 64)
VOCAB = 128_256
POSITIONS = 4  # of the CP head, with the first
RANK = 3  # experts of the CP head
TOP_K = 50  # of each DynaMo head
Case = tuple[
    str, Callable[..., Any], tuple[Any, ...]
]  # name, reference, arguments


def microseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median of a call."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return round(1e3 * do_bench(call, return_mode="median"), 4)
    from torch.utils.benchmark import Timer

    return round(
        1e6 * Timer("call()", globals={"call": call}).timeit(3).median, 4
    )


def cases(batch: int, vocab: int, device: torch.device) -> Iterator[Case]:
    """The kernels' calls on random numbers."""
    shape = (batch, POSITIONS, RANK, vocab)
    logits = torch.randn(shape, dtype=torch.bfloat16, device=device)
    weights = torch.zeros(batch, RANK, device=device)
    first = torch.zeros(batch, dtype=torch.int64, device=device)
    limits = torch.tensor([0.7, UNLIMITED, 1.0], device=device)
    heat, top_k, top_p = limits[:, None].repeat(1, batch)
    sampled = Sampling(heat, top_k, top_p, seeds=first, positions=first)
    yield "draft_chain, greedy", draft_chain, (weights, logits, first, None)
    yield "draft_chain, sampled", draft_chain, (weights, logits, first, sampled)
    scores = (
        torch.randn(2, batch, TOP_K, device=device).sort(descending=True).values
    )
    ids = torch.arange(TOP_K, device=device).expand(2, batch, TOP_K).contiguous()
    top = Top(scores, ids, first)
    yield "find_peaks", find_peaks, (top, None)
    peaks, joints = find_peaks(top, None)
    likeliest = back_off(peaks, top, torch.zeros(batch, device=device))
    yield "draw_ngrams", draw_ngrams, (joints, likeliest, top, sampled)


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """Both times, and whether the kernel pays; without a GPU only the reference runs."""
    name, reference, arguments = case
    torch_time = microseconds(partial(reference, *arguments), device)
    row = {"kernel": name, "torch": torch_time, "verdict": "not measured"}
    kernel = chosen(reference, torch.empty(0, device=device))
    if kernel is not reference:
        triton_time = microseconds(partial(kernel, *arguments), device)
        share = triton_time / torch_time
        pays = "pays" if share <= PAYS else "does not pay"
        row["Triton"] = triton_time
        row["verdict"] = f"{pays}: {share:.0%} of torch's time"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cpu", action="store_true", help="check that everything runs"
    )
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    args = parser.parse_args()
    device = torch.device("cpu" if args.cpu else "cuda")
    data = provenance(rows=[])
    for batch in [1, 3] if args.cpu else BATCHES:
        torch.manual_seed(batch)
        for case in cases(batch, 1000 if args.cpu else VOCAB, device):
            data["rows"].append({"batch": batch, **measure(case, device)})
            write_json(args.out, data)
    print(rows_table(data))


if __name__ == "__main__":
    main()
