# SPDX-License-Identifier: Apache-2.0
"""Seconds of every kernel beside its torch reference and beside what reading and writing its numbers must take.

    python -m vllm_ppd.benchmarks.gpu.kernels --out kernels.json          # on a GPU: vocabulary 128K, hidden 4096
    python -m vllm_ppd.benchmarks.gpu.kernels --cpu --out kernels.json    # tiny, the references alone: does it run?

The floor of a kernel is the greater of bytes / bandwidth and FLOP / peak, both measured here first, or given. Bytes are
those that no implementation can avoid: every input once, every output once. Medians; the caches are emptied before each
repetition; a launch's own cost counts, as it does in a server without CUDA graphs around it. Each row ends in a verdict
by the rule of 80 %: "kept" where the kernel reaches 80 % of the floor without being slower than torch, or takes at most
80 % of torch's time; else "does not pay".
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_ppd.benchmarks import only_writer
from vllm_ppd.benchmarks.gpu.entries import Entries
from vllm_ppd.kernels.cp_mixture import draft_chain
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.joint_threshold import adaptive_threshold
from vllm_ppd.kernels.paged_copy import copy_blocks
from vllm_ppd.kernels.rows import load_rows, store_rows
from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.kernels.unembed_topk import unembed_topk

PAYS = 0.8  # share of the floor, and of torch's time
WIDTH = 4  # tokens a request in a step: a base token and three drafts


class Case(NamedTuple):
    """One call to time."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    bytes: int
    flop: int = 0


def timed(call: Callable[[], Any], device: torch.device, repetitions: int, cold: torch.Tensor) -> float:
    """Median seconds of a call, caches emptied before each."""
    call()
    seconds = []
    for _ in range(repetitions):
        cold.zero_()
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            seconds.append(start.elapsed_time(stop) / 1e3)
        else:
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def bandwidth(device: torch.device, mib: int, repetitions: int, cold: torch.Tensor) -> float:
    """Bytes a second of a long copy, reads and writes together."""
    source = torch.ones(mib << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / timed(lambda: target.copy_(source), device, repetitions, cold)


def peak(device: torch.device, size: int, repetitions: int, cold: torch.Tensor) -> float:
    """FLOP a second of a large bfloat16 product."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / timed(lambda: a @ b, device, repetitions, cold)


def cases(batch: int, args: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Each kernel at one batch size, on random numbers."""
    v, d, n, r, k = args.vocab, args.hidden, args.positions, args.rank, args.top_k
    half: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    size = torch.bfloat16.itemsize
    hidden, unembedding = torch.randn(batch, d, **half), torch.randn(v, d, **half) * d**-0.5
    for best in (1, 4):
        yield Case(
            f"unembed_topk, k={best}",
            unembed_topk,
            (hidden, unembedding, best, 0, v),
            bytes=size * (v * d + batch * d),
            flop=2 * batch * v * d,
        )
    del unembedding
    logits = torch.randn(batch, n, r, v, **half)
    weights = torch.zeros(batch, r, device=device)
    first = torch.zeros(batch, dtype=torch.int64, device=device)
    moved = size * batch * n * r * v + 4 * batch * (n - 1) * v
    for name, heat in (("greedy", None), ("sampled", Sampling(torch.full((batch,), 0.7, device=device)))):
        yield Case(f"draft_chain, {name}", draft_chain, (weights, logits, first, heat), bytes=moved)
    del logits
    joint = torch.rand(batch, 1, k, k, device=device)
    joint /= joint.sum(dim=(1, 2, 3), keepdim=True)
    floor = torch.full((batch,), 1e-5, device=device)
    yield Case("adaptive_threshold", adaptive_threshold, (joint, floor), bytes=2 * 4 * joint.numel())
    stores = [torch.zeros(2 * WIDTH * batch, d, **half) for _ in range(2)]
    index = torch.randperm(2 * WIDTH * batch, device=device)[: WIDTH * batch]
    values = [torch.randn(WIDTH * batch, d, **half) for _ in range(2)]
    moved = 2 * size * 2 * WIDTH * batch * d
    yield Case("store_rows", store_rows, (stores, index, values), bytes=moved)
    yield Case("load_rows", load_rows, (stores, index), bytes=moved)
    heads, block, content = 8, 16, 256
    caches = [torch.zeros(2 * batch, heads, block, content, **half) for _ in range(args.layers)]
    source = torch.arange(batch, device=device)
    moved = 2 * size * batch * heads * block * content * args.layers
    yield Case("copy_blocks", copy_blocks, (caches, source, source + batch), bytes=moved)


def measure(case: Case, args: argparse.Namespace, device: torch.device, cold: torch.Tensor) -> dict[str, Any]:
    """One row of the table, in microseconds."""
    by_bytes, by_flop = case.bytes / args.bandwidth, case.flop / args.peak
    floor = max(by_bytes, by_flop)
    row = {
        "bytes": case.bytes,
        "flop": case.flop,
        "floor_us": 1e6 * floor,
        "bound": "bytes" if floor == by_bytes else "FLOP",
    }
    implementations = {"reference": case.function}
    if (kernel := chosen(case.function, torch.empty(0, device=device))) is not case.function:
        implementations["triton"] = kernel
    for name, function in implementations.items():
        seconds = timed(partial(function, *case.arguments), device, args.repetitions, cold)
        row |= {f"{name}_us": 1e6 * seconds, f"{name}_share_of_floor": floor / seconds}
    row["verdict"] = verdict(row)
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def verdict(row: dict[str, Any]) -> str:
    """Whether a kernel pays, by the rule of 80 %: "kept", "does not pay", or "not measured" without a GPU.

    Kept is what reaches 80 % of the floor and is not slower than torch, and what takes at most 80 % of torch's time
    where launches keep both far from the floor.
    """
    if "triton_us" not in row:
        return "not measured: the reference alone runs here"
    share, of_torch = row["triton_share_of_floor"], row["triton_us"] / row["reference_us"]
    kept = of_torch <= PAYS or (share >= PAYS and of_torch <= 1)
    return f"{'kept' if kept else 'does not pay'}: {share:.0%} of the floor, {of_torch:.0%} of torch's time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU: proves that everything runs")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--positions", type=int, default=4, help="positions of the CP head, the first one included")
    parser.add_argument("--rank", type=int, default=3, help="experts of the CP head")
    parser.add_argument("--top-k", type=int, default=50, help="of each DynaMo head")
    parser.add_argument("--layers", type=int, default=32, help="whose KV entries are copied")
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--bandwidth", type=float, help="GB/s, in place of a measurement")
    parser.add_argument("--peak", type=float, help="bfloat16 TFLOP/s, in place of a measurement")
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    args = parser.parse_args()
    if args.cpu:
        args.batch, args.vocab, args.hidden, args.layers, args.repetitions = [1, 3], 1000, 64, 2, 3
    elif not torch.cuda.is_available():
        parser.error("no GPU here; --cpu runs tiny sizes on the CPU")
    with only_writer(args.out, is_file=True):
        run(args)


def run(args: argparse.Namespace) -> None:
    """Measure what the file lacks."""
    device = torch.device("cpu" if args.cpu else "cuda")
    results = Entries(args.out, {key: value for key, value in vars(args).items() if key != "out"})
    cold = torch.empty((1 if args.cpu else 512) << 20, dtype=torch.uint8, device=device)
    if "machine" not in results:
        moved = args.bandwidth and 1e9 * args.bandwidth
        flop = args.peak and 1e12 * args.peak
        moved = moved or bandwidth(device, 1 if args.cpu else 2048, args.repetitions, cold)
        flop = flop or peak(device, 128 if args.cpu else 8192, args.repetitions, cold)
        results.add("machine", {"bytes_per_second": moved, "flop_per_second": flop})
    machine = results.content["entries"]["machine"]
    args.bandwidth, args.peak = machine["bytes_per_second"], machine["flop_per_second"]
    for batch in args.batch:
        torch.manual_seed(batch)
        for case in cases(batch, args, device):
            name = f"{case.name}, batch {batch}"
            if name not in results:
                results.add(name, measure(case, args, device, cold))
            entry = results.content["entries"][name]
            triton = f"{entry['triton_us']:10.1f}" if "triton_us" in entry else "         -"
            print(
                f"{name:36} floor {entry['floor_us']:10.2f}  torch {entry['reference_us']:10.1f}  Triton {triton} us  "
                f"{entry['verdict']}"
            )


if __name__ == "__main__":
    main()
