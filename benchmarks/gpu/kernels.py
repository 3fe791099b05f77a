# SPDX-License-Identifier: Apache-2.0
"""Times of the drafting kernels and of their torch references.

    python -m vllm_ppd.benchmarks.gpu.kernels --out kernels.json         # vocabulary 128K
    python -m vllm_ppd.benchmarks.gpu.kernels --cpu --out kernels.json   # tiny sizes, references only

Times are medians of triton.testing.do_bench, which empties the cache before each call; they include
a launch, as in a server without CUDA graphs around it. A kernel pays where it takes at most 80 % of
torch's time. Bytes are those that no implementation can avoid, every input and every output once:
their rate says how far a kernel is from the memory's.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_ppd.benchmarks.report import rows_table
from vllm_ppd.benchmarks.storage import provenance, write_json
from vllm_ppd.kernels.cp_mixture import draft_chain
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.joint import Top, back_off, find_peaks
from vllm_ppd.kernels.joint_draw import draw_ngrams
from vllm_ppd.kernels.sampling import Sampling

PAYS = 0.8  # share of torch's time
BATCHES = (1, 2, 4, 8, 16, 32, 64)
VOCAB = 128_256
POSITIONS = 4  # of the CP head, with the first
RANK = 3  # experts of the CP head
TOP_K = 50  # of each DynaMo head
BFLOAT16 = torch.bfloat16.itemsize
FLOAT32 = torch.float32.itemsize


class Case(NamedTuple):
    """A call to time."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    bytes: int


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of a call."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, return_mode="median")) / 1e3
    from torch.utils.benchmark import Timer

    return float(Timer("call()", globals={"call": call}).timeit(3).median)


def cp_cases(batch: int, vocab: int, device: torch.device) -> Iterator[Case]:
    shape = (batch, POSITIONS, RANK, vocab)
    logits = torch.randn(shape, dtype=torch.bfloat16, device=device)
    weights = torch.zeros(batch, RANK, device=device)
    first = torch.zeros(batch, dtype=torch.int64, device=device)
    moved = BFLOAT16 * logits.numel() + FLOAT32 * batch * (POSITIONS - 1) * vocab
    sampled = Sampling(torch.full((batch,), 0.7, device=device))
    yield Case("draft_chain, greedy", draft_chain, (weights, logits, first, None), moved)
    yield Case("draft_chain, sampled", draft_chain, (weights, logits, first, sampled), moved)


def dynamo_cases(batch: int, device: torch.device) -> Iterator[Case]:
    k = TOP_K
    scores = torch.randn(2, batch, k, device=device).sort(descending=True).values
    ids = torch.arange(k, device=device).expand(2, batch, k).contiguous()
    top = Top(scores, ids, torch.zeros(batch, dtype=torch.int64, device=device))
    moved = FLOAT32 * batch * k**2
    yield Case("find_peaks", find_peaks, (top, None, 1.0), moved)
    peaks, joints = find_peaks(top, None, 1.0)
    zeros = torch.zeros(batch, device=device)
    likeliest = back_off(peaks, top, zeros, 0.0)
    arguments = (joints, likeliest, top, 3, True, Sampling(zeros + 1))
    yield Case("draw_ngrams", draw_ngrams, arguments, 3 * moved)


def measure(case: Case, batch: int, device: torch.device) -> dict[str, Any]:
    """A row: microseconds, and whether the kernel pays; without a GPU only the reference runs."""
    reference = seconds(partial(case.function, *case.arguments), device)
    row = {"kernel": case.name, "batch": batch, "torch": round(1e6 * reference, 4)}
    kernel = chosen(case.function, torch.empty(0, device=device))
    if kernel is case.function:
        return {**row, "verdict": "not measured"}
    triton = seconds(partial(kernel, *case.arguments), device)
    rate = round(case.bytes / triton / 1e9, 1)
    return {**row, "Triton": round(1e6 * triton, 4), "GB/s": rate, "verdict": verdict(reference, triton)}


def verdict(reference: float, triton: float) -> str:
    """Whether a kernel pays, by its time and torch's."""
    pays = "pays" if triton <= PAYS * reference else "does not pay"
    return f"{pays}: {triton / reference:.0%} of torch's time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="check that everything runs")
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        parser.error("no GPU here; --cpu runs tiny sizes on the CPU")
    device = torch.device("cpu" if args.cpu else "cuda")
    vocab = 1000 if args.cpu else VOCAB
    settings = {"vocab": vocab, "positions": POSITIONS, "rank": RANK, "top_k": TOP_K}
    data = {**provenance(), "benchmark": "kernels", "settings": settings, "rows": []}
    for batch in [1, 3] if args.cpu else BATCHES:
        torch.manual_seed(batch)
        for case in [*cp_cases(batch, vocab, device), *dynamo_cases(batch, device)]:
            data["rows"].append(measure(case, batch, device))
            write_json(args.out, data)
    print(rows_table(data))


if __name__ == "__main__":
    main()
