# SPDX-License-Identifier: Apache-2.0
"""ParaDecode's ablations (Table 3 and Fig. 6) on both schedules: with and without T, over gamma.

    python benchmarks/demo/corpus.py --out build/corpus
    python benchmarks/paradecode_ablation.py --data build/corpus/validation.jsonl

Engines in one process take turns (vLLM alone first in each round) on the same prompts, one request at a time. Columns
are the paper's: speed-up over vLLM alone in the same round (median), consistency ratio (greedy tokens equal to vLLM's,
position by position), early predictions a token (Fig. 6b) and the share of them that verification rejects (Fig. 6c;
with schedule parallel also what followed a rejected one).

Table 3's row without verification is not offered: vLLM's rejection sampler stands behind every draft, and a server that
emitted the exit's tokens (23.83 % consistency in the paper) would serve another model. gamma 1 is vLLM alone: no
confidence exceeds it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.vllm_plugins.bench.prompts import read_prompts

DEMO = Path(__file__).resolve().parent / "demo"
COLUMNS = ("schedule", "T", "gamma", "speed-up", "quartiles", "consistency", "early predictions", "rejected")


class Contender:
    """An engine, and what it predicted early."""

    def __init__(self, args: argparse.Namespace, options: dict[str, Any] | None) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(args.model), dtype=args.dtype, enforce_eager=args.eager, max_num_seqs=4, seed=0,
            max_model_len=args.prompt_tokens + args.tokens + 32, kv_cache_memory_bytes=1 << 28,
            enable_prefix_caching=False, speculative_config=options,
        )  # fmt: skip
        self.predicted = self.rejected = 0
        core = self.llm.llm_engine.engine_core.engine_core
        if options is None:
            return
        drafter = core.model_executor.driver_worker.worker.model_runner.drafter
        if options["schedule"] == "parallel":
            self.decides = drafter.schedule  # holds gamma
            original = drafter.draft_plan

            def draft_plan(*arguments: Any) -> Any:
                result = original(*arguments)
                self.predicted += drafter.schedule.predictions
                self.rejected += drafter.schedule.rejections
                return result

            drafter.draft_plan = draft_plan
        else:
            self.decides = drafter.loop
            stats = core.scheduler.make_spec_decoding_stats

            def make_spec_decoding_stats(*arguments: Any, **counts: Any) -> Any:
                self.predicted += counts["num_draft_tokens"]
                self.rejected += counts["num_draft_tokens"] - counts["num_accepted_tokens"]
                return stats(*arguments, **counts)

            core.scheduler.make_spec_decoding_stats = make_spec_decoding_stats

    def decode(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens of each prompt."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = [self.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0] for ids in prompts]
        return time.perf_counter() - started, [list(output.outputs[0].token_ids) for output in outputs]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    prompts = read_prompts((str(args.data),), str(args.model), args.prompt_tokens, args.prompts, False)
    base = Contender(args, None)
    engines = {}
    for schedule in ("deferred", "parallel"):
        for heads in (args.heads, None):
            options = {"method": "paradecode", "schedule": schedule, "exit_layer": args.exit_layer}
            options |= {"num_speculative_tokens": args.drafts} | ({} if heads is None else {"model": str(heads)})
            engines[schedule, heads is not None] = Contender(args, options)
    settings = [(*key, gamma) for key in engines for gamma in args.gamma]
    ratios: dict[Any, list[float]] = {setting: [] for setting in settings}
    equal: dict[Any, list[float]] = {setting: [] for setting in settings}
    counts: dict[Any, tuple[int, int]] = {}
    for contender in (base, *engines.values()):
        contender.decode(prompts[:1], args.tokens)  # warm-up
    for _ in range(args.rounds):
        alone, expected = base.decode(prompts, args.tokens)
        for setting in settings:
            contender = engines[setting[:2]]
            contender.decides.gamma, contender.predicted, contender.rejected = setting[2], 0, 0
            seconds, tokens = contender.decode(prompts, args.tokens)
            ratios[setting].append(alone / seconds)
            pairs = [a == b for x, y in zip(tokens, expected, strict=True) for a, b in zip(x, y, strict=True)]
            equal[setting].append(statistics.mean(pairs))
            counts[setting] = contender.predicted, contender.rejected
    emitted = len(prompts) * args.tokens
    return [row(setting, ratios[setting], equal[setting], *counts[setting], emitted) for setting in settings]


def row(
    setting: tuple[str, bool, float],
    ratios: list[float],
    equal: list[float],
    predicted: int,
    rejected: int,
    emitted: int,
) -> dict[str, Any]:
    quartiles = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2
    values = (
        setting[0], "trained" if setting[1] else "none", setting[2], round(statistics.median(ratios), 3),
        f"{quartiles[0]:.2f}-{quartiles[1]:.2f}", round(statistics.mean(equal), 4),
        round(predicted / emitted, 3), round(rejected / predicted, 3) if predicted else None,
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "model")
    parser.add_argument("--heads", type=Path, default=DEMO / "heads" / "early")
    parser.add_argument("--data", type=Path, required=True, help="prompts")
    parser.add_argument("--exit-layer", type=int, nargs="+", default=[6])
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--gamma", type=float, nargs="+", default=[0.0, 0.2, 0.4, 0.6, 0.8, 0.99])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--eager", action="store_true", help="without compilation")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = measure(args)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for found in rows:
        print(f"| {' | '.join(str(found[column]) for column in COLUMNS)} |")
    if args.out is not None:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        result = provenance(benchmark="paradecode_ablation", settings=settings, rows=rows)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
