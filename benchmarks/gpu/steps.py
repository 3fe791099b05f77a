# SPDX-License-Identifier: Apache-2.0
"""What a decode step asks of the GPU's driver: kernels launched, graphs launched, waits of the host.

    python -m vllm_ppd.benchmarks.gpu.steps --model M --speculative-config '{"method": "ppd"}' --mode graphs

Prints method, runner, mode and the three counts of a step as a row of a table. The kernels inside a graph are not
counted: the host does not launch them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {"compilation_config": {"cudagraph_mode": "NONE"}},
    "graphs": {},
}
PROMPT_TOKENS, WARM_STEPS = 20, 6


def per_step(calls: Counter[str], steps: int) -> dict[str, float]:
    """Launches, graphs and waits of a step, of the driver's calls by name in so many steps."""
    kinds = {"launches": 0, "graphs": 0, "waits": 0}
    for name, count in calls.items():
        if "GraphLaunch" in name:
            kinds["graphs"] += count
        elif "LaunchKernel" in name:
            kinds["launches"] += count
        elif "Synchronize" in name or name == "cudaMemcpy":  # cudaMemcpyAsync does not wait by itself
            kinds["waits"] += count
    return {kind: round(count / steps, 1) for kind, count in kinds.items()}


def profiled(run: Callable[[], None], trace: str | None) -> Counter[str]:
    """The calls of the CUDA runtime and driver during a run, by name; a trace is the file of its timeline."""
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
        run()
    if trace is not None:
        profile.export_chrome_trace(trace)
        print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=10))
    return Counter({event.key: event.count for event in profile.key_averages()})


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Start an engine, decode for some steps, and count the calls of some more."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in the process that is profiled
    speculative = json.loads(args.speculative_config)
    if args.runner != "auto":
        if speculative is None:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(args.runner == "v2"))
        else:
            speculative = {**speculative, "runner": args.runner}
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256, "seed": 0}
    settings |= {"gpu_memory_utilization": 0.5, **MODES[args.mode], **json.loads(args.engine)}
    engine = LLM(model=args.model, speculative_config=speculative, **settings).llm_engine
    params = SamplingParams(temperature=args.temperature, max_tokens=400, ignore_eos=True, detokenize=False)
    for number in range(args.batch):
        ids = [5 + number + place for place in range(PROMPT_TOKENS)]
        engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    for _ in range(WARM_STEPS):
        engine.step()

    def run() -> None:
        for _ in range(args.steps):
            engine.step()

    return per_step(profiled(run, args.trace), args.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--speculative-config", default="null", metavar="JSON", help="vLLM's (default: no speculation)")
    parser.add_argument("--runner", choices=["auto", "v1", "v2"], default="auto")
    parser.add_argument("--mode", choices=MODES, default="graphs", help="of the target (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="requests (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="decode steps that are counted (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--engine", default="{}", metavar="JSON", help="more settings of the engine")
    parser.add_argument("--trace", metavar="FILE.json.gz", help="write the timeline, and print the longest kernels")
    args = parser.parse_args()
    calls = measure(args)
    method = (json.loads(args.speculative_config) or {}).get("method", "none")
    print(f"| {' | '.join([method, args.runner, args.mode, *(f'{count:g}' for count in calls.values())])} |")


if __name__ == "__main__":
    main()
