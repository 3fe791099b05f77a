# SPDX-License-Identifier: Apache-2.0
"""ParaDecode's ablations (Table 3 and Fig. 6) on both schedules: with and without T, unverified, gamma from 0 to 1.

    python benchmarks/demo/corpus.py --out build/corpus
    python benchmarks/inflate.py --model benchmarks/demo/model --parameters 100M --out build/inflated \\
        --heads benchmarks/demo/heads/early
    for schedule in deferred parallel; do
        python benchmarks/paradecode_ablation.py --model build/inflated/model --heads build/inflated/heads/early \\
            --data build/corpus/validation.jsonl --schedule $schedule --out benchmarks/results/paradecode_ablation.json
    done

Engines of one process (vLLM alone, the schedule with T and without) take turns on the same prompts, one request at a
time, always making every draft that gamma lets pass. A turn is written as soon as it is over; the same command adds
turns to those that are there, the rarest setting first, until each has --rounds of them or --minutes are over. Columns
are the paper's: speed-up over vLLM alone (median and quartiles; the base's turn is at most three turns old),
consistency ratio (greedy tokens equal to vLLM's, position by position), early predictions a token (Fig. 6b) and the
share of them that verification rejects (Fig. 6c; with schedule parallel also what followed a rejected one).

Without verification (Table 3) is this script's own doing, in its own process: vLLM's rejection sampler is replaced by
one that takes every draft, and schedule parallel keeps what its exits predict. No option of a server does that. The
last token of a step still is the final layer's, which in the paper only comes where an exit was unsure.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from engines import add_up

from vllm_ppd.heads.checkpoint import write_text
from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.vllm_plugins.bench.options import kv_cache
from vllm_ppd.vllm_plugins.bench.prompts import read_prompts
from vllm_ppd.vllm_plugins.bench.results import quartiles

DEMO = Path(__file__).resolve().parent / "demo"
COLUMNS = (
    "schedule", "T", "gamma", "verified", "turns", "speed-up", "quartiles", "consistency", "early predictions",
    "rejected",
)  # fmt: skip
DRAFTS = {"deferred": 3, "parallel": 7}  # a rejected draft wastes the ones behind it in one, restarts in the other
BASE_KEEPS = 3  # turns
# Table 3 (Llama-3.1-8B-Instruct, HumanEval): consistency in %, speed-up; and which row of ours that is.
TABLE_3 = {
    "ParaDecode": (97.24, 1.312, ("trained", 0.0, True)),
    "w/o verification step": (23.83, 1.605, ("trained", 0.0, False)),
    "w/o lightweight LM head training": (71.28, 0.863, ("none", 0.0, True)),
}
FIGURE_6 = (
    "Fig. 6 as the paper's text gives it (its curves are a picture): gamma = 0 predicts at every step and is fastest, "
    "about 30 % rejected; gamma = 0.8 about 5 % rejected; gamma = 1 predicts nothing."
)


class Setting(NamedTuple):
    """A row of the table."""

    schedule: str
    T: str  # "trained", or "none": the target's own norm and LM head
    gamma: float
    verified: bool


class Contender:
    """An engine, and what it predicted early."""

    def __init__(self, args: argparse.Namespace, options: dict[str, Any] | None) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(args.model), dtype=args.dtype, enforce_eager=args.eager, max_num_seqs=4, seed=0,
            max_model_len=args.prompt_tokens + args.tokens + 32, **kv_cache(0.25),
            enable_prefix_caching=False, speculative_config=options,
        )  # fmt: skip
        self.predicted = self.rejected = 0
        if options is None:
            return
        core = self.llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.drafter = self.runner.drafter
        self.parallel = options["schedule"] == "parallel"
        if self.parallel:
            self._after(self.drafter, "draft_plan", self._count_schedule)
        else:
            self._after(core.scheduler, "make_spec_decoding_stats", self._count_drafts)

    def _after(self, owner: Any, name: str, count: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            count(**kwargs)
            return result

        setattr(owner, name, counted)

    def _count_schedule(self) -> None:
        self.predicted += self.drafter.schedule.predictions
        self.rejected += self.drafter.schedule.rejections

    def _count_drafts(self, num_draft_tokens: int, num_accepted_tokens: int, **_: Any) -> None:
        self.predicted += num_draft_tokens
        self.rejected += num_draft_tokens - num_accepted_tokens

    def set(self, gamma: float, verified: bool) -> None:
        """What the next turn decodes with."""
        (self.drafter.schedule if self.parallel else self.drafter.loop).gamma = gamma
        self.predicted = self.rejected = 0
        vars(self.runner.rejection_sampler).pop("forward", None)
        if self.parallel:
            vars(self.drafter.schedule).pop("_verify", None)
        if not verified:
            self.runner.rejection_sampler.forward = take_every_draft
            if self.parallel:
                self.drafter.schedule._verify = keep_predictions(self.drafter.schedule)

    def decode(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens of each prompt."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = [self.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0] for ids in prompts]
        return time.perf_counter() - started, [list(output.outputs[0].token_ids) for output in outputs]


def take_every_draft(metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
    """In place of vLLM's RejectionSampler.forward: every draft, then the final layer's likeliest token."""
    from vllm.v1.outputs import SamplerOutput

    counts = torch.tensor(metadata.num_draft_tokens, device=logits.device)
    tokens = torch.full((len(counts), metadata.max_spec_len + 1), -1, dtype=torch.int32, device=logits.device)
    tokens[torch.arange(tokens.shape[1], device=logits.device) < counts[:, None]] = metadata.draft_token_ids.int()
    last = logits[metadata.bonus_logits_indices].argmax(dim=-1)
    tokens[torch.arange(len(counts), device=logits.device), counts] = last.int()
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)


def keep_predictions(schedule: Any) -> Callable[..., np.ndarray]:
    """In place of ParallelSchedule._verify: the final layer chooses only where no exit has predicted."""
    verify = schedule._verify

    def chosen(requests: np.ndarray, offsets: np.ndarray, final: Any) -> np.ndarray:
        unpredicted = schedule.newest[requests] == offsets
        if unpredicted.any():
            rest = final.rows(torch.from_numpy(np.flatnonzero(unpredicted)).to(schedule.device))
            verify(requests[unpredicted], offsets[unpredicted], rest)
        return unpredicted

    return chosen


class Record:
    """The JSON file: a run of this script an entry, a turn an entry of its run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.path: Path | None = args.out
        self.data: dict[str, Any] = {"benchmark": "paradecode_ablation", "runs": []}
        if self.path is not None and self.path.exists():
            self.data = json.loads(self.path.read_text())
            if self.data.get("benchmark") != "paradecode_ablation":
                raise SystemExit(f"{self.path} holds results of something else; give another --out")
        varying = ("out", "rounds", "minutes", "gamma", "schedule")
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in varying}
        self.run = provenance(settings=settings, turns=[])
        self.runs = [run for run in self.data["runs"] if add_up(run, self.run)] + [self.run]
        self.data["runs"].append(self.run)

    def add(self, setting: Setting, **measured: Any) -> None:
        self.run["turns"].append({**setting._asdict(), **measured})
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(self.data, indent=1) + "\n")

    def turns(self, setting: Setting) -> list[dict[str, Any]]:
        """Of this run and of those like it."""
        return turns_of(self.runs, setting)

    def settings(self) -> list[Setting]:
        """Every setting that has turns, both schedules'."""
        return settings_of(self.runs)


def measure(args: argparse.Namespace, record: Record) -> None:
    """Turn after turn, the rarest setting first."""
    started = time.perf_counter()
    prompts = read_prompts((str(args.data),), str(args.model), args.prompt_tokens, args.prompts, False)
    base, engines = Contender(args, None), {}
    for name, heads in (("trained", {"model": str(args.heads)}), ("none", {})):
        options = {"method": "paradecode", "schedule": args.schedule, "exit_layer": args.exit_layer, "adaptive": False}
        options["num_speculative_tokens"] = args.drafts or DRAFTS[args.schedule]
        engines[name] = Contender(args, options | heads)
    settings = [Setting(args.schedule, name, gamma, True) for gamma in args.gamma for name in engines]
    settings.insert(1, Setting(args.schedule, "trained", 0.0, False))
    for contender in (base, *engines.values()):
        contender.decode(prompts[:1], args.tokens)  # warm-up
    turn, alone, expected = 0, 0.0, []
    while min(len(record.turns(setting)) for setting in settings) < args.rounds:
        if time.perf_counter() - started > 60 * args.minutes:
            print(f"stopped after {args.minutes:g} minutes; the same command adds what is missing", flush=True)
            return
        setting = min(settings, key=lambda setting: len(record.turns(setting)))
        if turn % BASE_KEEPS == 0:
            alone, expected = base.decode(prompts, args.tokens)
        turn += 1
        contender = engines[setting.T]
        contender.set(setting.gamma, setting.verified)
        seconds, tokens = contender.decode(prompts, args.tokens)
        same = sum(a == b for x, y in zip(tokens, expected, strict=True) for a, b in zip(x, y, strict=True))
        record.add(
            setting, seconds=seconds, base_seconds=alone, tokens=len(prompts) * args.tokens, same_tokens=same,
            predicted=contender.predicted, rejected=contender.rejected,
        )  # fmt: skip


def row(setting: Setting, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table, over all turns of a setting."""
    ratios = [turn["base_seconds"] / turn["seconds"] for turn in turns]
    middle, low, high = quartiles(ratios)
    tokens, same, predicted, rejected = (
        sum(turn[key] for turn in turns) for key in ("tokens", "same_tokens", "predicted", "rejected")
    )
    values = (
        *setting[:3], "yes" if setting.verified else "no", len(turns), round(middle, 3),
        f"{low:.2f}-{high:.2f}", f"{same / tokens:.2%}", round(predicted / tokens, 3),
        f"{rejected / predicted:.1%}" if predicted and setting.verified else "",
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def settings_of(runs: list[dict[str, Any]]) -> list[Setting]:
    """Every setting that has turns in some runs, in the order of the table."""
    found = {Setting(*(turn[name] for name in Setting._fields)) for run in runs for turn in run["turns"]}
    return sorted(found, key=_order)


def rows_of(runs: list[dict[str, Any]]) -> dict[Setting, dict[str, Any]]:
    """A row a setting that has turns in some runs."""
    return {one: row(one, turns_of(runs, one)) for one in settings_of(runs)}


def turns_of(runs: list[dict[str, Any]], setting: Setting) -> list[dict[str, Any]]:
    return [turn for run in runs for turn in run["turns"] if setting._asdict().items() <= turn.items()]


def stored(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of a file of results the newest run, and the rows of it and those like it."""
    runs = json.loads(path.read_text())["runs"]
    alike = [run for run in runs if add_up(run, runs[-1])]
    return runs[-1], list(rows_of(alike).values())


def _order(setting: Setting) -> tuple[str, bool, bool, float]:
    return setting.schedule, setting.T != "trained", not setting.verified, setting.gamma


def show(record: Record) -> None:
    """All rows, then Table 3 beside the paper's."""
    rows = rows_of(record.runs)
    print(f"\n| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for found in rows.values():
        print(f"| {' | '.join(str(found[column]) for column in COLUMNS)} |")
    schedules = sorted({setting.schedule for setting in rows})
    head = ["Table 3", "paper", *schedules]
    print(f"\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for name, (consistency, speed_up, which) in TABLE_3.items():
        ours = [rows.get(Setting(schedule, *which)) for schedule in schedules]
        cells = ["not measured" if own is None else f"{own['consistency']}, {own['speed-up']}x" for own in ours]
        print(f"| {name} | {consistency:.2f}%, {speed_up}x | {' | '.join(cells)} |")
    print(f"\n{FIGURE_6}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "model")
    parser.add_argument("--heads", type=Path, default=DEMO / "heads" / "early")
    parser.add_argument("--data", type=Path, required=True, help="prompts")
    parser.add_argument("--schedule", choices=list(DRAFTS), default="deferred", help="which one this run measures")
    parser.add_argument("--exit-layer", type=int, nargs="+", default=[6])
    parser.add_argument("--drafts", type=int, help=f"a step (default: {DRAFTS})")
    parser.add_argument("--gamma", type=float, nargs="+", default=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each setting, earlier runs' included")
    parser.add_argument("--minutes", type=float, default=8, help="after which no further turn begins")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--eager", action="store_true", help="without compilation")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record = Record(args)
    try:
        measure(args, record)
    finally:
        if record.settings():
            show(record)


if __name__ == "__main__":
    main()
