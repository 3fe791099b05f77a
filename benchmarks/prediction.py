# SPDX-License-Identifier: Apache-2.0
"""Hold what `ppd plan` predicts against what `ppd bench decode` measured.

    ppd bench decode --model M --heads DIR ... --out benchmarks/results/decode.json
    python benchmarks/prediction.py benchmarks/results/decode.json --out benchmarks/results/prediction.json

Acceptance is the heads' own calibration's, on greedy or sampled texts as the turns were, and runs at temperatures that
were not calibrated are left out; seconds are those of vLLM's own steps in the same runs (`ppd plan --timings`). Where
drafting is adaptive, the best number of drafts up to the contender's, none among them, is what is predicted; what a
step with drafts costs by itself is held against its formula by step_prediction.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from vllm_ppd.heads.calibration.stored import calibration_of
from vllm_ppd.heads.calibration.tables import table
from vllm_ppd.heads.checkpoint import HeadsError, load_config
from vllm_ppd.heads.config import HeadsConfig
from vllm_ppd.heads.planning.options import PlanOptions
from vllm_ppd.heads.planning.plan import all_ways
from vllm_ppd.heads.planning.predict import Drafting
from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.vllm_plugins.bench.results import Measured, stored
from vllm_ppd.vllm_plugins.naming import is_ours

COLUMNS = ("temperature", "batch", "contender", "length", "predicted length", "measured", "quartiles", "predicted",
           "measured / predicted")  # fmt: skip


def rows_of(file: Path, measured: Measured) -> Iterator[dict[str, Any]]:
    """A row a contender with calibrated heads, and batch size."""
    options = measured.run["options"]
    for row in measured.rows():
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
    plan = PlanOptions(heads=(config["model"],), texts=texts, timings=timings, model=options["model"])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="results of ppd bench decode")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.out is not None:  # now, not after all that was measured
        args.out.parent.mkdir(parents=True, exist_ok=True)
    everything = stored(args.file)
    rows = [row for measured in everything for row in rows_of(args.file, measured)]
    if not rows:
        raise SystemExit(f"{args.file} has no contender with calibrated heads")
    print(table(COLUMNS, [[row[column] for column in COLUMNS] for row in rows]))
    if args.out is not None:
        model = everything[-1].run["options"]["model"]
        args.out.write_text(json.dumps(provenance(benchmark="prediction", model=model, rows=rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
