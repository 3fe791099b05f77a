# SPDX-License-Identifier: Apache-2.0
"""Acceptance of every method on the demo model, through vLLM, greedy and sampled.

    python benchmarks/demo/acceptance.py --out benchmarks/results/demo_acceptance.json     # about eight minutes

Prompts are taken from the middle of held-out files. Accepted a step counts every engine step after the prompt's;
acceptance rate and length are vLLM's (accepted / drafted tokens; 1 + accepted / drafts, chain drafts, bonus token
included). Small models fall into loops under greedy decoding, and loops flatter acceptance: the share of repeated
4-grams stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from corpus import split

from vllm_ppd.heads.checkpoint import load_config
from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.vllm_plugins.bench.options import kv_cache

HERE = Path(__file__).resolve().parent
SETTINGS = {"greedy": 0.0, "T 0.8": 0.8}
COLUMNS = ("drafted a step", "accepted a step", "rate", "length", "repeated 4-grams")


def whole(folder: str | Path) -> dict[str, int]:
    """The whole vocabulary to draft from, where heads recommend a part of it."""
    config = load_config(folder)
    return {} if config.draft_vocab_size is None else {"draft_vocab_size": config.target.vocab_size}


def variants(exits: list[int], drafts: int, also: list[str]) -> dict[str, dict[str, Any]]:
    """What is compared: name -> speculative_config."""
    heads = HERE / "heads"
    found: dict[str, dict[str, Any]] = {}
    for layer in exits:
        found[f"ppd, exit {layer}, no heads"] = {"method": "ppd", "exit_layer": layer}
        found[f"ppd, exit {layer}, early heads"] = {"method": "ppd", "exit_layer": layer, "model": str(heads / "early")}
    for folder in [str(heads / "cp"), *also]:
        config = json.loads((Path(folder) / "config.json").read_text())
        name = f"cp, rank {config['rank']}" if "rank" in config else config["speculators_model_type"]
        found[name] = {"model": folder} | whole(folder)
    found["cp, draft vocabulary 1024"] = {"model": str(heads / "cp"), "draft_vocab_size": 1024}
    for tokens in (2, 3):
        options = {"model": str(heads / "dynamo"), "eps_b": 0.0, "num_speculative_tokens": tokens - 1}
        options |= whole(heads / "dynamo")
        found[f"dynamo T{tokens}, always all"] = options
        found[f"dynamo T{tokens}, eps_b 0.5"] = options | {"eps_b": 0.5}
    found["vLLM's ngram"] = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    fixed = {name: {"num_speculative_tokens": drafts, **options} for name, options in found.items()}
    # What is accepted, whether or not it pays.
    return {name: options | ({} if name.startswith("vLLM") else {"adaptive": False}) for name, options in fixed.items()}


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


def measure(model: Path, options: dict[str, Any], texts: list[str], tokens: int) -> list[dict[str, Any]]:
    """One engine, every setting."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=16, seed=0,
        **kv_cache(0.25), disable_log_stats=False, speculative_config=options,
    )  # fmt: skip
    rows = []
    for setting, temperature in SETTINGS.items():
        before = counters(llm)
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate(texts, params, use_tqdm=False)
        change = {name: value - before[name] for name, value in counters(llm).items()}
        steps = len(texts) * (tokens - 1) - change["accepted_tokens"]
        repeats = [repeated_4_grams(list(output.outputs[0].token_ids)) for output in outputs]
        rows.append({
            "setting": setting,
            "steps": int(steps),
            **{name: int(value) for name, value in change.items()},
            "drafted a step": round(change["draft_tokens"] / steps, 3),
            "accepted a step": round(change["accepted_tokens"] / steps, 3),
            "rate": round(change["accepted_tokens"] / max(change["draft_tokens"], 1), 4),
            "length": round(1 + change["accepted_tokens"] / max(change["drafts"], 1), 3),
            "repeated 4-grams": round(sum(repeats) / len(repeats), 3),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--exit-layers", type=int, nargs="*", default=[1, 6, 9, 11])
    parser.add_argument("--also", nargs="*", default=[], metavar="DIR", help="further heads folders")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.out is not None:  # now, not after all that was measured
        args.out.parent.mkdir(parents=True, exist_ok=True)
    texts = prompts(args.prompts)
    rows = []
    print(f"| method | texts | {' | '.join(COLUMNS)} |\n| --- | --- |{' ---: |' * len(COLUMNS)}")
    for name, options in variants(args.exit_layers, args.drafts, args.also).items():
        for row in measure(args.model, options, texts, args.tokens):
            print(f"| {name} | {row['setting']} | {' | '.join(str(row[column]) for column in COLUMNS)} |", flush=True)
            rows.append({"method": name, **row})
    if args.out is not None:
        result = provenance(
            benchmark="demo_acceptance",
            command=" ".join(["python", "benchmarks/demo/acceptance.py", *sys.argv[1:]]),
            settings={"drafts": args.drafts, "prompts": len(texts), "tokens": args.tokens, "dtype": "float32"},
            rows=rows,
        )
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
