# SPDX-License-Identifier: Apache-2.0
"""Acceptance of every method on the demo model, through vLLM, greedy and sampled.

    python -m vllm_ppd.benchmarks.models.acceptance --out benchmarks/results/demo_acceptance.json   # eight minutes

Prompts are taken from the middle of held-out files. Accepted a step counts every engine step after the prompt's;
acceptance rate and length are vLLM's (accepted / drafted tokens; 1 + accepted / drafts, chain drafts, bonus token
included). Small models fall into loops under greedy decoding, and loops flatter acceptance: the share of repeated
4-grams stands beside it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from vllm_ppd.benchmarks.harness.batch import Parts, decode_batch, repeats
from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.benchmarks.harness.engine import COUNTERS, Engine
from vllm_ppd.benchmarks.harness.machine import restart_for_engines
from vllm_ppd.benchmarks.harness.options import kv_cache
from vllm_ppd.benchmarks.harness.results import Row, write_rows
from vllm_ppd.benchmarks.models.corpus import split
from vllm_ppd.benchmarks.models.train import DEMO
from vllm_ppd.heads.calibration.tables import table
from vllm_ppd.heads.io import load_config

SETTINGS = {"greedy": 0.0, "T 0.8": 0.8}
COLUMNS = ("method", "setting", "drafted a step", "accepted a step", "rate", "length", "repeated 4-grams")


def whole(folder: str | Path) -> dict[str, int]:
    """The whole vocabulary to draft from, where heads recommend a part of it."""
    config = load_config(folder)
    return {} if config.draft_vocab_size is None else {"draft_vocab_size": config.target.vocab_size}


def variants(exits: list[int], drafts: int, also: list[str]) -> dict[str, dict[str, Any]]:
    """What is compared: name -> speculative_config."""
    heads = DEMO / "heads"
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


def texts_of(count: int) -> list[str]:
    """400 characters from the middle of held-out files."""
    texts = [text for text in split()[1] if len(text) > 2000]
    return [text[len(text) // 2 :][:400] for text in texts[:count]]


def measure(model: Path, name: str, config: dict[str, Any], prompts: list[list[int]], tokens: int) -> list[Row]:
    """One engine, every setting."""
    arguments = {
        "model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": 512,
        "max_num_seqs": len(prompts), "seed": 0, **kv_cache(0.25),
    }  # fmt: skip
    engine = Engine(Contender(name, config), arguments)
    rows = []
    for setting, temperature in SETTINGS.items():
        found = decode_batch(engine, prompts, tokens, temperature, Parts(None))
        texts = found["token_ids"]
        steps = len(prompts) * (tokens - 1) - found["accepted_tokens"]
        looped = repeats(texts)
        rows.append({
            "method": name, "setting": setting, "steps": steps, **{counter: found[counter] for counter in COUNTERS},
            "drafted a step": round(found["draft_tokens"] / steps, 3),
            "accepted a step": round(found["accepted_tokens"] / steps, 3),
            "rate": round(found["accepted_tokens"] / max(found["draft_tokens"], 1), 4),
            "length": round(1 + found["accepted_tokens"] / max(found["drafts"], 1), 3),
            "repeated 4-grams": round(looped["repeated_4_grams"] / looped["all_4_grams"], 3),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "model")
    parser.add_argument("--exit-layers", type=int, nargs="*", default=[1, 6, 9, 11])
    parser.add_argument("--also", nargs="*", default=[], metavar="DIR", help="further heads folders")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    restart_for_engines()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [tokenizer(text)["input_ids"] for text in texts_of(args.prompts)]
    rows = []
    for name, config in variants(args.exit_layers, args.drafts, args.also).items():
        rows += measure(args.model, name, config, prompts, args.tokens)
        print(table(COLUMNS, [[row[column] for column in COLUMNS] for row in rows[-len(SETTINGS) :]]), flush=True)
    if args.out is not None:
        settings = {"drafts": args.drafts, "prompts": len(prompts), "tokens": args.tokens, "dtype": "float32"}
        write_rows(args.out, "demo_acceptance", rows, settings=settings)


if __name__ == "__main__":
    main()
