# SPDX-License-Identifier: Apache-2.0
"""Times of every kernel and its torch reference.

    python -m vllm_ppd.benchmarks.gpu.kernels --out kernels.json          # on a GPU: vocabulary 128K
    python -m vllm_ppd.benchmarks.gpu.kernels --cpu --out kernels.json    # tiny sizes, references only: a dry run

Times are medians of triton.testing.do_bench, which empties the cache before each call; they include a launch, as in a
server without CUDA graphs around it. A kernel pays where it takes at most 80 % of torch's time. Bytes are those that no
implementation can avoid, every input and every output once: their rate says how far a kernel is from the memory's.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_ppd.benchmarks import only_writer
from vllm_ppd.benchmarks.harness.results import Row, write_rows
from vllm_ppd.heads.in_words import table
from vllm_ppd.kernels.cp_mixture import draft_chain
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.joint import Top, back_off, find_peaks
from vllm_ppd.kernels.joint_draw import draw_ngrams
from vllm_ppd.kernels.sampling import Sampling

PAYS = 0.8  # share of torch's time


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


def cases(batch: int, args: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Each kernel at a batch size, on random numbers."""
    v, n, r, k = args.vocab, args.positions, args.rank, args.top_k
    half: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    size = torch.bfloat16.itemsize
    logits = torch.randn(batch, n, r, v, **half)
    weights = torch.zeros(batch, r, device=device)
    first = torch.zeros(batch, dtype=torch.int64, device=device)
    moved = size * batch * n * r * v + 4 * batch * (n - 1) * v
    for name, heat in (("greedy", None), ("sampled", Sampling(torch.full((batch,), 0.7, device=device)))):
        yield Case(f"draft_chain, {name}", draft_chain, (weights, logits, first, heat), moved)
    del logits
    scores = torch.randn(2, batch, k, device=device).sort(descending=True).values
    top = Top(scores, torch.arange(k, device=device).expand(2, batch, k).contiguous(), first)
    yield Case("find_peaks", find_peaks, (top, None, 1.0), 4 * batch * k**2)
    peaks, joints = find_peaks(top, None, 1.0)
    zeros = torch.zeros(batch, device=device)
    likeliest, heat = back_off(peaks, top, zeros, 0.0), Sampling(zeros + 1)
    yield Case("draw_ngrams", draw_ngrams, (joints, likeliest, top, 3, True, heat), 3 * 4 * batch * k**2)


def measure(case: Case, batch: int, device: torch.device) -> Row:
    """A row of the table: microseconds, and whether the kernel pays; without a GPU only the reference runs."""
    reference = seconds(partial(case.function, *case.arguments), device)
    row: Row = {"kernel": case.name, "batch": batch, "torch": round(1e6 * reference, 4), "verdict": "not measured"}
    if (kernel := chosen(case.function, torch.empty(0, device=device))) is not case.function:
        triton = seconds(partial(kernel, *case.arguments), device)
        row |= {"Triton": round(1e6 * triton, 4), "GB/s": round(case.bytes / triton / 1e9, 1)}
        row["verdict"] = verdict(reference, triton)
    return row


def verdict(reference: float, triton: float) -> str:
    """Whether a kernel pays, by its time and torch's."""
    return f"{'pays' if triton <= PAYS * reference else 'does not pay'}: {triton / reference:.0%} of torch's time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="run tiny sizes on the CPU, to check that everything runs")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--positions", type=int, default=4, help="positions of the CP head, including the first")
    parser.add_argument("--rank", type=int, default=3, help="experts of the CP head")
    parser.add_argument("--top-k", type=int, default=50, help="of each DynaMo head")
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    args = parser.parse_args()
    if args.cpu:
        args.batch = [1, 3]
        args.vocab = 1000
    elif not torch.cuda.is_available():
        parser.error("no GPU here; --cpu runs tiny sizes on the CPU")
    device = torch.device("cpu" if args.cpu else "cuda")
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    rows: list[Row] = []
    with only_writer(args.out):
        for batch in args.batch:
            torch.manual_seed(batch)
            for case in cases(batch, args, device):
                if args.only in case.name:
                    rows.append(measure(case, batch, device))
                    write_rows(
                        args.out, "kernels", rows, [], settings=settings
                    )  # keep measurements if the run is stopped
    names = ["kernel", "batch", "torch", "Triton", "GB/s", "verdict"]
    print(table(names, [[row.get(name, "-") for name in names] for row in rows]))


if __name__ == "__main__":
    main()
