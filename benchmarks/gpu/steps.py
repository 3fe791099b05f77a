# SPDX-License-Identifier: Apache-2.0
"""Calls of CUDA and host time of a decode step of several systems.

    python -m vllm_ppd.benchmarks.gpu.steps --model M --out steps.json \
        --system 'alone=null' --system 'cp={"model": "HEADS"}'

Engines start one after another. The last rows are for a step in which a prompt joins
the batch.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from vllm_ppd.benchmarks.engine import EngineProcess, add_requests
from vllm_ppd.benchmarks.report import rows_table
from vllm_ppd.benchmarks.systems import System
from vllm_ppd.heads.files import write_json
from vllm_ppd.heads.provenance import provenance

PROMPT = list(range(5, 25))
BATCHES = (1, 8)
WARM_STEPS = 30
STEPS = 100
NEW_TOKENS = 400
SETTINGS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "seed": 0,
    "gpu_memory_utilization": 0.3,
    "enable_prefix_caching": False,
}
COLUMNS = ("launches", "copies", "graphs", "nodes", "waits")


def count_calls(engine: Any, batch: int) -> list[dict[str, Any]]:
    """Calls of a decode step, and of a step that a prompt joins; runs in the engine's process."""
    names = add_requests(engine, [PROMPT] * batch, NEW_TOKENS, 0.0, 1.0)
    for _ in range(WARM_STEPS):
        engine.step()
    decoding = profile(engine, STEPS)
    names += add_requests(engine, [PROMPT], NEW_TOKENS, 0.0, 1.0, first=batch)
    joining = profile(engine, 1)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return [{"step": "decode", **decoding}, {"step": "a prompt joins", **joining}]


def profile(engine: Any, steps: int) -> dict[str, float]:
    """Mean calls of a step by COLUMNS, and the median microseconds of this thread's CPU time."""
    import torch

    seconds = []
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(
        activities=[activities.CPU, activities.CUDA]
    ) as profiler:
        for _ in range(steps):
            started = time.thread_time()
            engine.step()
            seconds.append(time.thread_time() - started)
    events = {event.key: event.count for event in profiler.key_averages()}
    calls = {
        name: round(count / steps, 1) for name, count in by_kind(events).items()
    }
    return calls | {"host microseconds": round(1e6 * median(seconds))}


def by_kind(events: dict[str, int]) -> dict[str, int]:
    """The profiler's events by COLUMNS; nodes are the kernels and copies in launched graphs."""
    kinds = dict.fromkeys(COLUMNS, 0)
    on_device = 0
    for name, count in events.items():
        if "GraphLaunch" in name:
            kinds["graphs"] += count
        elif "LaunchKernel" in name:
            kinds["launches"] += count
        elif "Synchronize" in name or name == "cudaMemcpy":
            # cudaMemcpyAsync does not wait
            kinds["waits"] += count
        elif name.startswith("cudaMemcpy"):
            kinds["copies"] += count
        elif not name.startswith(("cuda", "cu", "aten::", "Memset")):
            on_device += count
    kinds["nodes"] = max(0, on_device - kinds["launches"] - kinds["copies"])
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--system", action="append", required=True, metavar="NAME=JSON"
    )
    args = parser.parse_args()
    settings = {**SETTINGS, "model": args.model}
    decoding = []
    joining = []
    for text in args.system:
        name, _, config = text.partition("=")
        log = args.out.with_suffix(f".{name}.log")
        engine = EngineProcess(System(name, json.loads(config)), settings, log)
        for batch in BATCHES:
            place = {"system": name, "batch": batch}
            decode, join = engine.call(count_calls, batch)
            decoding.append(place | decode)
            joining.append(place | join)
        engine.close()
    data = provenance(model=args.model, rows=decoding + joining)
    write_json(args.out, data)
    print(rows_table(data))


if __name__ == "__main__":
    main()
