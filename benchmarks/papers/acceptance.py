# SPDX-License-Identifier: Apache-2.0
"""`ppd bench acceptance`: whether every contender's greedy text is vLLM's, and how many drafts it gets accepted.

One engine at a time. Each part of the prompts is kept as soon as it is decoded; a stopped run goes on there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tqdm import tqdm

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.batch import repeats
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender, contenders
from vllm_ppd.benchmarks.harness.estimates import Estimate, ratio
from vllm_ppd.benchmarks.harness.options import named
from vllm_ppd.benchmarks.harness.process import EngineProcess
from vllm_ppd.benchmarks.harness.prompts import read_prompts as cut_prompts
from vllm_ppd.benchmarks.harness.results import Measured, Results, Turn, all_runs
from vllm_ppd.benchmarks.harness.session import Stopped
from vllm_ppd.benchmarks.papers.drafting_cost import costs
from vllm_ppd.benchmarks.papers.options import AcceptanceOptions
from vllm_ppd.benchmarks.papers.tasks import Task, read_prompts
from vllm_ppd.heads.calibration.tables import table as markdown
from vllm_ppd.heads.io import HeadsError
from vllm_ppd.heads.planning.options import PlanOptions
from vllm_ppd.heads.planning.plan import make_plan
from vllm_ppd.heads.planning.report import setting_of
from vllm_ppd.vllm_plugins.registry import METHODS

# GB/s, TFLOP/s in bfloat16 and microseconds of a link, by the makers' data sheets.
MACHINES = {"H100": (3350.0, 990.0, 10.0), "L4": (300.0, 121.0, 10.0)}
PLANNED = {"model", "num_speculative_tokens", "adaptive"}  # options of what `ppd plan` predicts
COLUMNS = (
    "contender", "prompts", "same as vLLM", "accepted a step (interval)", "drafted a step", "rate", "length",
    "repeated 4-grams", "cost", "predicted",
)  # fmt: skip
LEGEND = """\
same as vLLM: prompts whose text equals that of vLLM without speculation, token for token (greedy).
accepted, drafted a step: drafts, of every step after the prompt's; interval at 90 %, by parts of the prompts.
rate, length: accepted / drafted, 1 + accepted / steps with drafts.
cost: weights that the drafts of a step read, over those that a pass of the target reads (counted).
predicted: (1 + accepted) / (1 + cost), the speed-up of these drafts where memory bounds a step; not measured."""

PREDICTED = (
    "Predictions, not measured: speed-ups by `ppd plan --hardware`, batch 1, a roofline without the host's work."
)


def run(options: AcceptanceOptions) -> str:
    """Measure what is not there yet; the tables.

    Raises:
        BenchError, HeadsError: on input that does not fit, or if vLLM alone does not start.
        Stopped: on Ctrl-C.
    """
    task = task_of(options)
    everyone = [fixed(one, options.drafts) for one in contenders(options) if one.name != CONTROL]
    runs = all_runs(options, everyone, task=task.name, prompts=len(task.prompts), left_out=task.left_out)
    size = options.batch_sizes[0]
    parts = [task.prompts[start : start + size] for start in range(0, len(task.prompts), size)]
    try:
        with tqdm(total=len(everyone) * len(runs) * len(parts), desc="parts", mininterval=1) as progress:
            for contender in everyone:
                _measure(contender, options, runs, parts, progress)
    except KeyboardInterrupt:
        raise Stopped(f"stopped; what was decoded is kept in {options.out}, the same command goes on there") from None
    counted = costs(everyone, options.model, options.trust_remote_code)
    predicted = predictions(options.heads)
    for results in runs:
        results.run |= {"predicted": predicted, "costs": counted}
        results.finish()
    return report(runs)


def task_of(options: AcceptanceOptions) -> Task:
    """The prompts of the file; of texts, pieces of up to --prompt-tokens.

    Raises:
        BenchError, TrainingError: if the file is missing or malformed, or holds no prompt.
    """
    from transformers import AutoTokenizer

    if len(options.data) != 1:
        raise BenchError("--data: give one file of chats, prompts or texts")
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    found = read_prompts(options.data[0], tokenizer, options.prompts, options.prompt_tokens)
    if found is not None:
        return found
    name, path = named(options.data[0])
    limits = options.prompt_tokens, options.prompts, options.trust_remote_code
    return Task(name, path, cut_prompts((path,), options.model, *limits), texts=True)


def report(found: Sequence[Measured]) -> str:
    """Markdown: a table a temperature, and what is predicted for other machines."""
    header = ["heads", *(f"{name}, predicted" for name in MACHINES)]
    predicted = [PREDICTED, markdown(header, rows)] if (rows := found[-1].run.get("predicted")) else []
    return "\n\n".join([*map(table, found), LEGEND, *predicted])


def fixed(contender: Contender, drafts: int) -> Contender:
    """A contender that makes as many drafts in every step."""
    config = contender.speculative_config
    if config is None or config.get("method", "ppd") not in METHODS:
        return contender
    return replace(contender, speculative_config={"num_speculative_tokens": drafts, **config, "adaptive": False})


def _measure(
    contender: Contender, options: AcceptanceOptions, runs: list[Results], parts: list[list[list[int]]], progress: Any
) -> None:
    """The parts that no run has yet, of every temperature."""
    # Every temperature of a part in a row: the second finds the prompts' KV in the prefix cache.
    everything = [(results, part) for part in range(len(parts)) for results in runs]
    missing = [(results, part) for results, part in everything if _turn(results, contender.name, part) is None]
    progress.update(len(everything) - len(missing))
    if not missing:
        return
    with TemporaryDirectory(prefix="ppd-bench-") as folder:
        progress.set_postfix_str(f"starting {contender.name}")
        try:
            longest = max(len(ids) for part in parts for ids in part) + options.new_tokens
            arguments = {**options.engine_arguments, "max_model_len": longest + 32}
            engine = EngineProcess(contender, arguments, Path(folder) / "log")
            engine.ready()
        except BenchError as error:
            if contender.name == BASE:
                raise
            for results in runs:
                results.fail(contender.name, str(error))
            progress.update(len(missing))
            return
        progress.set_postfix_str(contender.name)
        try:
            for results, part in missing:
                temperature = float(results.run["options"]["temperature"])
                turn = engine.turn(parts[part], options.new_tokens, temperature, options.top_p)
                ids = turn.pop("token_ids")
                kept = {name: turn[name] for name in ("drafts", "draft_tokens", "accepted_tokens")}
                steps = len(ids) * (options.new_tokens - 1) - turn["accepted_tokens"]
                found = {"contender": contender.name, "part": part, "prompts": len(ids), "steps": steps, **kept}
                if not temperature:
                    base = ids if contender.name == BASE else (_turn(results, BASE, part) or {})["token_ids"]
                    found["differ"] = [i for i, (a, b) in enumerate(zip(base, ids, strict=True)) if a != b]
                    found |= {"token_ids": ids} if contender.name == BASE else {}
                results.add(found | repeats(ids))
                progress.update()
        finally:
            engine.close()


def _turn(results: Measured, name: str, part: int) -> Turn | None:
    """What a contender decoded of a part, in this run or one like it."""
    turns = (turn for run in results.runs_of(name) for turn in run["turns"])
    return next((turn for turn in turns if turn["contender"] == name and turn["part"] == part), None)


def _turns(results: Measured) -> Iterator[tuple[str, list[Turn]]]:
    """What each contender decoded, those left out that decoded nothing."""
    count = -(-results.run["prompts"] // results.run["options"]["batch_sizes"][0])
    for name in results.contenders:
        turns = [turn for part in range(count) if (turn := _turn(results, name, part)) is not None]
        if turns:
            yield name, turns


def _accepted(turns: list[Turn], generator: np.random.Generator) -> Estimate:
    """Drafts accepted a step."""
    above, below = (np.array([turn[key] for turn in turns]) for key in ("accepted_tokens", "steps"))
    return ratio(above, below, generator)


def _cost(results: Measured, name: str) -> float | None:
    """Weights that a contender's drafts read, in passes; None where these were not counted."""
    return next((run["costs"][name] for run in results.runs_of(name) if name in run.get("costs", ())), None)


def headline(found: Sequence[Measured]) -> str:
    """Markdown: accepted drafts a step by temperature, their cost, and predicted speed-ups, a row a contender."""
    generator = np.random.default_rng(0)
    predicted = {row[0]: row[1:] for row in found[-1].run.get("predicted") or ()}
    columns: list[dict[str, str]] = []  # one a temperature: a contender may lack some
    folders, cost = dict[str, str](), dict[str, str]()
    header = ["drafts from"]
    for one in found:
        temperature = one.run["options"]["temperature"]
        header.append(f"accepted, T {temperature:g}" if temperature else "accepted, greedy")
        columns.append({})
        for name, turns in _turns(one):
            if name != BASE:
                accepted = _accepted(turns, generator)
                columns[-1][name] = f"{accepted.value:.2f} ({accepted.interval})"
                config = one.contenders[name]["speculative_config"] or {}
                # A plan knows nothing of further options, as prompt lookups.
                folders[name] = Path(config.get("model", "")).name if config.keys() <= PLANNED else ""
                cost[name] = "-" if (passes := _cost(one, name)) is None else f"{passes:.2f}"
    rows = [
        [
            name,
            *(column.get(name, "-") for column in columns),
            cost[name],
            *predicted.get(folder, ["-"] * len(MACHINES)),
        ]
        for name, folder in folders.items()
    ]
    return markdown([*header, "cost, passes", *(f"predicted, {name}" for name in MACHINES)], rows)


def table(results: Measured) -> str:
    """Markdown: a row a contender."""
    run = results.run
    options, generator = run["options"], np.random.default_rng(0)
    rows = []
    for name, turns in _turns(results):
        sums = {key: sum(turn[key] for turn in turns) for key in turns[0] if isinstance(turns[0][key], int)}
        differ = sum(len(turn.get("differ", ())) for turn in turns)
        same = "-" if options["temperature"] else f"{sums['prompts'] - differ} of {sums['prompts']}"
        accepted, cost = _accepted(turns, generator), _cost(results, name)
        rows.append([
            name, sums["prompts"], same, f"{accepted.value:.3f} ({accepted.interval})",
            f"{sums['draft_tokens'] / sums['steps']:.3f}",
            f"{sums['accepted_tokens'] / sums['draft_tokens']:.3f}" if sums["draft_tokens"] else "-",
            f"{1 + sums['accepted_tokens'] / sums['drafts']:.3f}" if sums["drafts"] else "-",
            f"{sums['repeated_4_grams'] / max(sums['all_4_grams'], 1):.3f}",
            *(("-", "-") if cost is None else (f"{cost:.3f}", f"{(1 + accepted.value) / (1 + cost):.2f}")),
        ])  # fmt: skip
    top_p = f", top-p {options['top_p']:g}" if options["temperature"] and options["top_p"] < 1 else ""
    about = (
        f"{options['model']}, {options['dtype']}, {run['task']} ({run['prompts']} prompts, {run['left_out']} longer "
        f"ones left out), {options['new_tokens']} tokens, temperature {options['temperature']:g}{top_p}, "
        f"{options['drafts']} drafts in every step; {run['machine']}"
    )
    lines = [about, "", markdown(COLUMNS, rows), *(f"left out: {reason}" for reason in run["failures"].values())]
    return "\n".join(lines)


def predictions(heads: tuple[str, ...]) -> list[list[str]]:
    """What `ppd plan` predicts for MACHINES from each calibration: a row of cells a heads folder."""
    rows = []
    for folder in heads:
        cells = [Path(folder).name]
        try:
            for hardware in MACHINES.values():
                best = make_plan(PlanOptions.model_validate({"heads": (folder,), "hardware": hardware})).ways[0]
                cells.append(f"{best.speedup:.2f} ({setting_of(best.way)})")
        except HeadsError as error:
            tqdm.write(f"no prediction: {error}")
            continue
        rows.append(cells)
    return rows
