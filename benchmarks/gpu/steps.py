# SPDX-License-Identifier: Apache-2.0
"""Calls of CUDA and host time of a decode step of several contenders, in turns.

    python -m vllm_ppd.benchmarks.gpu.steps --model M --out steps.json --contender 'alone=null' \
        --contender 'cp={"method": "cp", "model": "HEADS"}' --contender 'EAGLE={"method": "eagle", "model": "EAGLE"}'

All engines are alive and decode in turns. Calls of a step are the same in every round; the host's time is that of the
least disturbed round. The last rows are for a step in which a prompt joins the batch.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.benchmarks.harness.process import EngineProcess
from vllm_ppd.benchmarks.harness.results import write_rows
from vllm_ppd.heads.in_words import table
from vllm_ppd.heads.locking import writing_file

PROMPT_TOKENS, WARM_STEPS, NEW_TOKENS = 20, 30, 400
SETTINGS: dict[str, Any] = {
    "max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 512, "seed": 0, "gpu_memory_utilization": 0.3,
    "enable_prefix_caching": False,
}  # fmt: skip


def prompts(batch: int) -> list[list[int]]:
    """Token IDs of a number of prompts."""
    return [[5 + number + place for place in range(PROMPT_TOKENS)] for number in range(batch)]


def measure(engines: list[EngineProcess], batches: list[int], rounds: int, args: argparse.Namespace) -> list[Any]:
    """A row per contender and batch, from the least disturbed round; then one for a step that a prompt joins."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for number in range(rounds):
        for batch in batches:
            for engine in engines if number % 2 == 0 else engines[::-1]:
                engine.call("begin", prompts(batch), NEW_TOKENS, args.temperature, args.top_p)
                engine.call("advance", WARM_STEPS)
                for step, calls in (
                    ("decode", engine.call("count_calls", args.steps)),
                    ("a prompt joins", engine.call("count_calls", 1, prompts(1)[0])),
                ):
                    row = {"contender": engine.name, "step": step, "batch": batch} | calls
                    known = rows.setdefault((step, engine.name, batch), row)
                    if row["host microseconds"] < known["host microseconds"]:
                        rows[step, engine.name, batch] = row
                engine.call("end")
                print(f"round {number + 1} of {rounds}, batch {batch}: {engine.name} {calls}", flush=True)
    return sorted(rows.values(), key=lambda row: (row["step"] != "decode", row["batch"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--contender", action="append", required=True, metavar="NAME=JSON", help="speculative_config")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="decode steps per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--engine", default="{}", metavar="JSON", help="further settings of the engines")
    args = parser.parse_args()
    settings = {**SETTINGS, "model": args.model, **json.loads(args.engine)}
    engines: list[EngineProcess] = []
    configs = {name: json.loads(config) for name, _, config in (text.partition("=") for text in args.contender)}
    with writing_file(args.out):
        try:
            for name, config in configs.items():
                engines.append(EngineProcess(Contender(name, config), settings, args.out.with_suffix(f".{name}.log")))
                engines[-1].ready()
                print(f"{name} is ready", flush=True)
            rows = measure(engines, args.batch, args.rounds, args)
        finally:
            for engine in engines:
                engine.close()
        write_rows(args.out, "rows", rows, configs.values(), model=args.model)
    print(table(list(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
