# SPDX-License-Identifier: Apache-2.0
"""Acceptance of untrained exits on the demo model, by exit layer, greedy and sampled.

    python benchmarks/demo/acceptance.py --out benchmarks/results/demo_acceptance.json     # about three minutes

Prompts are taken from the middle of held-out files. Acceptance is vLLM's: rate = accepted / drafted tokens, length =
1 + accepted / drafts, chain drafts, bonus token included. Small models fall into loops under greedy decoding, and loops
flatter acceptance: the share of repeated 4-grams stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from corpus import split

HERE = Path(__file__).resolve().parent
SETTINGS = {
    "greedy": (0.0, "greedy"),
    "T 0.8, greedy drafts": (0.8, "greedy"),
    "T 0.8, sampled drafts": (0.8, "probabilistic"),
}


def prompts(count: int) -> list[str]:
    """400 characters from the middle of held-out files."""
    texts = [text for text in split()[1] if len(text) > 2000]
    return [text[len(text) // 2 :][:400] for text in texts[:count]]


def repeated_4_grams(token_ids: list[int]) -> float:
    grams = [tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def counters(llm: Any) -> dict[str, float]:
    names = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {key: names.get(f"vllm:spec_decode_num_{key}", 0.0) for key in ("drafts", "draft_tokens", "accepted_tokens")}


def measure(model: Path, exit_layer: int, drafts: int, setting: str, texts: list[str], tokens: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    temperature, method = SETTINGS[setting]
    options = {
        "method": "ppd", "exit_layer": exit_layer, "num_speculative_tokens": drafts, "draft_sample_method": method,
    }  # fmt: skip
    llm = LLM(
        model=str(model), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=16, seed=0,
        kv_cache_memory_bytes=1 << 28, disable_log_stats=False, speculative_config=options,
    )  # fmt: skip
    before = counters(llm)
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate(texts, params, use_tqdm=False)
    change = {name: value - before[name] for name, value in counters(llm).items()}
    repeats = [repeated_4_grams(list(output.outputs[0].token_ids)) for output in outputs]
    return {
        "exit_layer": exit_layer,
        "setting": setting,
        **{name: int(value) for name, value in change.items()},
        "rate": round(change["accepted_tokens"] / change["draft_tokens"], 4),
        "length": round(1 + change["accepted_tokens"] / change["drafts"], 3),
        "repeated_4_grams": round(sum(repeats) / len(repeats), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--exit-layers", type=int, nargs="+", default=[3, 6, 9, 10, 11])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    texts = prompts(args.prompts)
    rows = []
    print(f"{'exit':>4}  {'setting':<24} {'rate':>6} {'length':>7} {'repeated 4-grams':>17}")
    for exit_layer in args.exit_layers:
        for setting in SETTINGS:
            row = measure(args.model, exit_layer, args.drafts, setting, texts, args.tokens)
            numbers = f"{row['rate']:>6.3f} {row['length']:>7.2f} {row['repeated_4_grams']:>17.3f}"
            print(f"{exit_layer:>4}  {setting:<24} {numbers}", flush=True)
            rows.append(row)
    if args.out is not None:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        result = {
            "benchmark": "demo_acceptance",
            "command": " ".join(["python", "benchmarks/demo/acceptance.py", *sys.argv[1:]]),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "git": git.stdout.strip(),
            "settings": {"drafts": args.drafts, "prompts": len(texts), "tokens": args.tokens, "dtype": "float32"},
            "rows": rows,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
