# SPDX-License-Identifier: Apache-2.0
"""Hold what `ppd plan` predicts against what was measured: whole runs, or single steps with drafts.

    ppd bench decode --model M --heads DIR ... --out decode.json
    python -m vllm_ppd.benchmarks.decode.plan_check decode.json --out plan_check.json

    ppd calibrate DIR --data validation.jsonl                # each heads folder, on this machine
    ppd bench closed-loop --model M --heads DIR ... --data validation.jsonl --always --batch-sizes 1 --verified 4 \\
        --rounds 32 --rounds-a-text 2 --prompt-tokens 64 --warm-up 0 --temperatures 0.8,0 --out plan_check.turns.json
    python -m vllm_ppd.benchmarks.decode.plan_check plan_check.turns.json --out plan_check.json

Acceptance is the heads' own calibration's, on greedy or sampled texts as the turns were; runs at temperatures that were
not calibrated are left out. Of whole runs, seconds are those of vLLM's own steps in them (`ppd plan --timings`), and
where drafting is adaptive the best number of drafts up to the contender's, none among them, is predicted.

Of steps, the prediction needs vLLM's own steps with one request and with --verified, measured in the same turns.
"length" is tokens a step where texts are equally long, as requests are and as the calibration counts; turns have as
many steps, in which a text that accepts much makes more tokens. "step" is in units of vLLM's own step at batch 1, the
median over pairs, and "measured" is "length" over it. "at the measured length" is the speed-up against the formula of
the step alone, as if these few texts had been predicted to accept what they did.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vllm_ppd.benchmarks.decode.closed_loop import VERIFYING, Pair
from vllm_ppd.benchmarks.decode.closed_loop_table import pairs_of
from vllm_ppd.benchmarks.decode.table import rows_of as decode_rows
from vllm_ppd.benchmarks.harness.estimates import quartiles
from vllm_ppd.benchmarks.harness.results import Measured, Row, stored, write_rows
from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.calibration.tables import table
from vllm_ppd.heads.io import HeadsError, load_config
from vllm_ppd.heads.planning.machine import Served
from vllm_ppd.heads.planning.options import PlanOptions
from vllm_ppd.heads.planning.plan import all_ways, calibration_of
from vllm_ppd.heads.planning.predict import Drafting
from vllm_ppd.vllm_plugins.config.naming import is_ours


def ways_of(config: dict[str, Any], heads: HeadsConfig, options: dict[str, Any],
            timings: str | None = None) -> list[Drafting]:  # fmt: skip
    """The calibrated settings that a contender may draft with.

    Args:
        config: its speculative_config.
        heads: what its folder says of itself.
        options: temperature and model.
        timings: as of PlanOptions.
    """
    texts: Literal["sampled", "greedy"] = "sampled" if options["temperature"] else "greedy"
    plan = PlanOptions.model_validate(
        {"heads": (config["model"],), "texts": texts, "timings": timings, "model": options["model"]}
    )
    most = config.get("num_speculative_tokens", heads.num_speculative_tokens)
    wanted: dict[str, Any] = {"exit_layer": None, "eps_b": None}
    if hasattr(heads, "default_exit_layers"):
        wanted["exit_layer"] = config.get("exit_layer", heads.default_exit_layers[0])
    if hasattr(heads, "sampling"):
        wanted["eps_b"] = config.get("eps_b", heads.sampling.eps_b)
    size = config.get("draft_vocab_size", heads.draft_vocab_size)
    found = []
    for way in all_ways(plan)[1]:
        drafts = way.options["num_speculative_tokens"]
        fits = drafts <= most if config.get("adaptive", True) else drafts == most
        same = all(way.options.get(name) == value for name, value in wanted.items())
        if not (fits and same and "model" in way.options):
            continue
        assert isinstance(way, Drafting)
        if way.options.get("draft_vocab_size") == size:
            found.append(way)
        elif texts == "greedy" and size is not None:
            # Shorter vocabularies are calibrated on sampled texts alone: the whole one's acceptance at the part's cost.
            part = way.setting.reads * size / heads.target.vocab_size
            found.append(dataclasses.replace(way, setting=way.setting._replace(reads=part)))
    return found


def whole_runs(file: Path, measured: Measured) -> Iterator[Row]:
    """Of `ppd bench decode`: a row a contender with calibrated heads, and batch size."""
    options = measured.run["options"]
    for row in decode_rows(measured):
        config = measured.contenders[row["contender"]]["speculative_config"] or {}
        if "model" not in config or "prompt_lookup_min" in config:
            continue  # what a text repeats is no property of the heads
        if "method" in config and not is_ours(config):
            continue  # heads of vLLM's own methods
        try:
            heads = load_config(config["model"])
            if options["temperature"] not in (0, calibration_of(config["model"])["options"]["temperature"]):
                continue
            ways = ways_of(config, heads, options, str(file))
        except HeadsError as error:
            print(f"{row['contender']}: {error}")
            continue
        if not ways:
            continue
        best = max(ways, key=lambda way: way.speedup(row["batch"]))
        predicted = best.speedup(row["batch"])
        drafts = predicted > 1 or not config.get("adaptive", True)
        predicted = predicted if drafts else 1.0
        middle, low, high = row["speed_up"]
        yield {
            "temperature": options["temperature"], "batch": row["batch"], "contender": row["contender"],
            "length": round(row["length"] or 1, 3), "predicted length": round(best.length if drafts else 1, 3),
            "measured": round(middle, 3), "quartiles": f"{low:.3f}-{high:.3f}", "predicted": round(predicted, 3),
            "measured / predicted": round(middle / predicted, 3),
        }  # fmt: skip


def single_steps(measured: Measured) -> Iterator[Row]:
    """Of `ppd bench closed-loop --always --verified ROWS`: a row a heads folder."""
    options = measured.run["options"]
    (pairs,) = pairs_of([measured]).values()
    several, one = step_seconds(pairs[VERIFYING], options["steps"])
    # A ratio of the same seconds: the machine is as fast as it is in both.
    seconds = {"1": float(np.median(one)), str(options["verified"]): float(np.median(one) * np.median(several / one))}
    for name, identity in measured.contenders.items():
        config = identity["speculative_config"] or {}
        if name in pairs and "model" in config and is_ours(config):
            way = always_drafting(config["model"], options, seconds)
            yield {"temperature": options["temperature"]} | step_row(name, way, pairs[name], options)


def always_drafting(heads: str, options: dict[str, Any], seconds: dict[str, float]) -> Drafting:
    """The calibrated setting that always drafts what the heads recommend, on a machine of these steps.

    Raises:
        HeadsError: if the heads were not calibrated.
    """
    way = max(ways_of({"model": heads, "adaptive": False}, load_config(heads), options), key=lambda way: way.speedup(1))
    share = calibration_of(heads)["parts"]["timing"]["lm_head_share"]
    return dataclasses.replace(way, machine=Served(seconds, way.num_layers, share))


def step_row(name: str, way: Drafting, pairs: Sequence[Pair], options: dict[str, Any]) -> Row:
    """What a contender's pairs of turns amount to beside its prediction."""
    seconds, plain = step_seconds(pairs, options["steps"])
    step, low, high = quartiles((seconds / plain).tolist())
    length = even_length(pairs, options["steps"], options["rounds_a_text"])
    formula = way.seconds(1) / way.plain(1)
    return {
        "contender": name, "pairs": len(pairs), "drafts": way.options["num_speculative_tokens"],
        "length": round(length, 3), "predicted length": round(way.length, 3),
        "step": round(step, 3), "quartiles": f"{low:.3f}-{high:.3f}", "predicted step": round(formula, 3),
        "measured": round(length / step, 3), "predicted": round(way.speedup(1), 3),
        "measured / predicted": round(length / step / way.speedup(1), 3),
        "at the measured length": round(formula / step, 3),
    }  # fmt: skip


def step_seconds(pairs: Sequence[Pair], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """[pairs] of a step of the contender, in turns of so many, and of vLLM alone at batch 1 beside it."""
    _, seconds, _, plain_tokens, plain_seconds = np.array(pairs).T
    return seconds / (2 * steps), plain_seconds / plain_tokens


def even_length(pairs: Sequence[Pair], steps: int, of_text: int) -> float:
    """Tokens a step where texts are equally long: a text of which much is accepted takes fewer steps, not more tokens.

    Args:
        pairs: of turns of so many steps, in the order of the texts.
        steps: of a turn.
        of_text: pairs of each text.
    """
    tokens = np.array(pairs)[:, 0]
    of_texts = tokens[: len(tokens) // of_text * of_text].reshape(-1, of_text).sum(axis=1)
    return float(1 / np.mean(2 * steps * of_text / of_texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="results of ppd bench decode, or of closed-loop --always --verified")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    everything = stored(args.file)
    if everything and "verified" in everything[0].run["options"]:
        rows = [row for measured in everything for row in single_steps(measured)]
    else:
        rows = [row for measured in everything for row in whole_runs(args.file, measured)]
    if not rows:
        raise SystemExit(f"{args.file} has no contender with calibrated heads")
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    if args.out is not None:
        write_rows(args.out, "plan_check", rows, model=everything[-1].run["options"]["model"])


if __name__ == "__main__":
    main()
