# SPDX-License-Identifier: Apache-2.0
"""What a cycle of early drafting costs beside the formula n * l/L + 1, and where the rest goes.

    python benchmarks/cycle_cost.py                       # 305M parameters, random weights, bf16, batch 1
    python benchmarks/cycle_cost.py --batch 1 4 8 --exit-layer 3 --drafts 3 --out benchmarks/results/cycle_cost.json

Two engines in one process, vLLM alone and vLLM with early drafting, take turns (A B A B); medians of single engine
steps. A cycle is one engine step: the deep pass that verifies, and the shallow loop that drafts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

PROMPT_TOKENS = 64


def write_config(folder: Path, args: argparse.Namespace) -> Path:
    """A Llama of a few hundred million parameters, as a config alone: the weights are random."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 7 // 2,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 64,
        "num_key_value_heads": args.hidden // 64,
        "head_dim": 64,
        "vocab_size": args.vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": args.dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parameters(args: argparse.Namespace) -> int:
    """Weights of the model of write_config (vLLM's CPU backend repacks them, so they cannot be counted there)."""
    layer = 4 * args.hidden**2 + 3 * args.hidden * (args.hidden * 7 // 2) + 2 * args.hidden
    return args.layers * layer + args.vocab * args.hidden + args.hidden


class Timers:
    """Seconds by part, collected by wrapping the calls that make up a cycle."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, part: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - started

        setattr(owner, name, timed)


def start(model: Path, args: argparse.Namespace, speculative_config: dict[str, Any] | None) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype, max_model_len=1024,
        max_num_seqs=max(args.batch), max_num_batched_tokens=1024, kv_cache_memory_bytes=1 << 30, block_size=32,
        enable_prefix_caching=False, enforce_eager=args.eager, seed=0, speculative_config=speculative_config,
    )  # fmt: skip


def steps(llm: Any, batch: int, count: int, tag: str, before: Callable[[], None] = lambda: None) -> list[float]:
    """Seconds of each engine step in which all requests decode; before() is called when they do."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, detokenize=False)
    names = [
        engine.add_request(
            f"{tag}-{i}", {"prompt_token_ids": [(7 * i + j * j) % 1000 + 2 for j in range(PROMPT_TOKENS)]}, params
        )
        for i in range(batch)
    ]
    for _ in range(4):  # prefill, and steps until every request decodes from saved states
        engine.step()
    before()
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    engine.abort_request(names, internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder), args)
        stock = start(model, args, None)
        options = {"method": "ppd", "exit_layer": args.exit_layer, "num_speculative_tokens": args.drafts}
        drafting = start(model, args, options)
    drafter = drafting.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    timers = Timers()
    first, last = drafter.cut.stacks[0], drafter.cut.stacks[-1]
    drafter.cut.stacks = [TimedStack(first, timers, "shallow layers"), TimedStack(last, timers, "deep layers")]
    timers.wrap(drafter.passes, "_attention", "attention metadata of the shallow passes")
    timers.wrap(drafter.reader, "greedy", "norm and LM head at the exit")
    timers.wrap(drafter, "draft", "draft")
    rows = []
    for batch in args.batch:
        full: list[float] = []
        cycle: list[float] = []
        parts: dict[str, list[float]] = defaultdict(list)
        for llm in (stock, drafting):
            steps(llm, batch, 4, "warm-up")
        for turn in range(args.turns):
            full += steps(stock, batch, args.steps, f"a{batch}-{turn}")
            cycle += steps(drafting, batch, args.steps, f"b{batch}-{turn}", timers.seconds.clear)
            for name, value in timers.seconds.items():
                parts[name].append(value / args.steps)
        rows.append(row(args, batch, full, cycle, {name: statistics.median(values) for name, values in parts.items()}))
    return {
        "benchmark": "cycle_cost",
        "command": " ".join(["python", "benchmarks/cycle_cost.py", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {_cpu()}",
        "model": f"Llama, {parameters(args) / 1e6:.0f}M parameters, random weights, {args.layers} layers, {args.dtype}",
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "rows": rows,
    }


class TimedStack:
    """A stack whose calls are timed."""

    def __init__(self, stack: Any, timers: Timers, part: str) -> None:
        self.stack, self.timers, self.part = stack, timers, part
        self.start, self.stop = stack.start, stack.stop

    def __call__(self, *args: Any) -> Any:
        started = time.perf_counter()
        result = self.stack(*args)
        self.timers.seconds[self.part] += time.perf_counter() - started
        return result


def row(
    args: argparse.Namespace, batch: int, full: list[float], cycle: list[float], parts: dict[str, float]
) -> dict[str, Any]:
    """One batch size: medians in milliseconds and everything in units of the full pass."""
    unit = statistics.median(full)
    formula = args.drafts * args.exit_layer / args.layers + 1
    total = statistics.median(cycle)
    # Medians of a noisy machine need not add up: the remainder is what the wrapped parts leave.
    known = parts["shallow layers"] + parts["deep layers"] + parts["norm and LM head at the exit"]
    known += parts["attention metadata of the shallow passes"]
    draft_rest = parts["draft"] - (known - parts["deep layers"])
    return {
        "batch": batch,
        "full_pass_ms": round(1e3 * unit, 2),
        "full_pass_ms_quartiles": [round(1e3 * q, 2) for q in statistics.quantiles(full, n=4)[::2]],
        "cycle_ms": round(1e3 * total, 2),
        "cycle_ms_quartiles": [round(1e3 * q, 2) for q in statistics.quantiles(cycle, n=4)[::2]],
        "cycle_in_passes": round(total / unit, 3),
        "formula": round(formula, 3),
        "ratio": round(total / unit / formula, 3),
        "parts_in_passes": {
            **{name: round(value / unit, 3) for name, value in parts.items() if name != "draft"},
            "rest of drafting (states, plan, host)": round(draft_rest / unit, 3),
            "rest of the step (verify, sample, schedule)": round((total - known - draft_rest) / unit, 3),
        },
    }


def show(result: dict[str, Any]) -> None:
    settings = result["settings"]
    print(f"\n{result['model']}, exit {settings['exit_layer']}, n = {settings['drafts']}; {result['machine']}")
    print(f"{'batch':>5} {'full pass':>12} {'cycle':>12} {'cycle/pass':>11} {'formula':>8} {'ratio':>6}")
    for r in result["rows"]:
        print(
            f"{r['batch']:>5} {r['full_pass_ms']:>9.2f} ms {r['cycle_ms']:>9.2f} ms {r['cycle_in_passes']:>11.3f} "
            f"{r['formula']:>8.3f} {r['ratio']:>6.3f}"
        )
    for r in result["rows"]:
        print(f"\nbatch {r['batch']}: a cycle in units of the full pass")
        for name, value in r["parts_in_passes"].items():
            print(f"  {value:>7.3f}  {name}")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1280)
    parser.add_argument("--vocab", type=int, default=16_384)
    parser.add_argument("--exit-layer", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=30, help="engine steps a turn")
    parser.add_argument("--turns", type=int, default=4, help="turns of each engine")
    parser.add_argument("--eager", action="store_true", help="without compilation")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    result = measure(args)
    show(result)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
