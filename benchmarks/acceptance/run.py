# SPDX-License-Identifier: Apache-2.0
"""`ppd bench acceptance`: whether every contender's greedy text equals vLLM's, and its accepted drafts.

One engine at a time decodes the prompts batch by batch. Each batch is written as soon as it is decoded, and a stopped
run continues there.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import safe_open
from tqdm import tqdm

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.acceptance.options import AcceptanceOptions
from vllm_ppd.benchmarks.acceptance.prompts import task_of
from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender, contenders
from vllm_ppd.benchmarks.harness.estimates import Estimate, bootstrap, cells, number, repeats
from vllm_ppd.benchmarks.harness.process import EngineProcess
from vllm_ppd.benchmarks.harness.results import Measured, Results, Row, Turn, all_runs
from vllm_ppd.benchmarks.harness.session import Stopped
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.in_words import table as markdown
from vllm_ppd.heads.io import load_config
from vllm_ppd.heads.planning.machine import weights_of
from vllm_ppd.vllm_plugins.registry import METHODS

COUNTS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_lengths")
COLUMNS: dict[str, Callable[[Row], str]] = {
    "contender": lambda row: str(row["contender"]),
    "prompts": lambda row: str(row["prompts"]),
    "same as vLLM": lambda row: "-" if row["same"] is None else f"{row['same']} of {row['prompts']}",
    "accepted per step (interval)": lambda row: str(row["accepted"].text()),
    "drafted per step": lambda row: number(row["drafted"], "{:.3f}"),
    "rate": lambda row: number(row["rate"], "{:.3f}"),
    "length": lambda row: number(row["length"], "{:.3f}"),
    "repeated 4-grams": lambda row: number(row["repeated"], "{:.3f}"),
    "cost": lambda row: number(row["cost"], "{:.3f}"),
}
LEGEND = """\
same as vLLM: prompts whose text equals that of vLLM without speculation, token for token (greedy).
accepted, drafted: drafts per step after the prompt's; 90 % interval, estimated over parts of the prompts.
rate, length: accepted / drafted, 1 + accepted / steps with drafts.
cost: weights read for the drafts of a step, relative to those read by a pass of the target (counted)."""


def run(options: AcceptanceOptions) -> str:
    """Measure what the file of results lacks; returns the tables.

    Raises:
        BenchError, HeadsError: on input that does not fit, or if vLLM alone does not start.
        Stopped: on Ctrl-C.
    """
    task = task_of(options)
    everyone = [fixed(contender, options.drafts) for contender in contenders(options) if contender.name != CONTROL]
    batches = task.batches(options.batch_sizes[0])
    prompts = sum(len(batch) for _, batch in batches)
    runs = all_runs(options, everyone, task=task.name, prompts=prompts, left_out=task.left_out)
    try:
        for contender in everyone:
            _measure(contender, options, runs, batches)
    except KeyboardInterrupt:
        raise Stopped(f"stopped; results are kept in {options.out}; the same command continues there") from None
    counted = costs(everyone, options.model, options.trust_remote_code)
    for results in runs:
        results.finish(costs=counted)
    return report(runs)


def fixed(contender: Contender, drafts: int) -> Contender:
    """A contender with a fixed number of drafts in every step."""
    config = contender.speculative_config
    if config is None or config.get("method", "ppd") not in METHODS:
        return contender
    return replace(contender, speculative_config={"num_speculative_tokens": drafts, **config, "adaptive": False})


def _measure(
    contender: Contender, options: AcceptanceOptions, runs: list[Results], batches: list[tuple[str, list[list[int]]]]
) -> None:
    """Decode the batches that no run has decoded yet, at every temperature."""
    name = contender.name
    # All temperatures of a batch in a row, so that later ones find the prompts' KV in the prefix cache.
    missing = [(results, at) for at in range(len(batches)) for results in runs if at not in _turns(results, name)]
    if not missing:
        return
    longest = max(len(ids) for _, batch in batches for ids in batch) + options.new_tokens
    arguments = {**options.engine_arguments, "max_model_len": longest + 32}
    with TemporaryDirectory(prefix="ppd-bench-") as folder:
        try:
            engine = EngineProcess(contender, arguments, Path(folder) / "log")
            engine.ready()
        except BenchError as error:
            if name == BASE:
                raise
            for results in runs:
                results.fail(name, str(error))
            return
        with closing(engine):
            for results, at in tqdm(missing, desc=name, mininterval=1):
                temperature = float(results.run["options"]["temperature"])
                category, batch = batches[at]
                decoded = engine.call("turn", batch, options.new_tokens, temperature, options.top_p)
                ids = decoded.pop("token_ids")
                turn = {
                    "contender": name, "part": at, "category": category, "prompts": len(ids),
                    "steps": len(ids) * (options.new_tokens - 1) - decoded["accepted_tokens"],
                    **{count: decoded[count] for count in COUNTS},
                }  # fmt: skip
                if not temperature:
                    base = ids if name == BASE else _turns(results, BASE)[at]["token_ids"]
                    turn["differ"] = [i for i, (a, b) in enumerate(zip(base, ids, strict=True)) if a != b]
                    turn |= {"token_ids": ids} if name == BASE else {}
                results.add(turn | repeats(ids))


def _turns(results: Measured, name: str) -> dict[int, Turn]:
    """Turns of a contender in this run or one like it, by the number of the batch."""
    turns = [turn for run in results.runs_of(name) for turn in run["turns"] if turn["contender"] == name]
    return {turn["part"]: turn for turn in reversed(turns)}


def rows_of(results: Measured) -> list[Row]:
    """A row per contender with turns; intervals are over batches of prompts."""
    rows = []
    for name in results.contenders:
        turns = [turn for _, turn in sorted(_turns(results, name).items())]
        if not turns:
            continue
        sums = {key: sum(turn[key] for turn in turns) for key, value in turns[0].items() if isinstance(value, int)}
        drafted, accepted, steps = (sums[key] for key in ("draft_tokens", "accepted_tokens", "steps"))
        counts = ([turn[key] for turn in turns] for key in ("accepted_tokens", "steps"))
        costs = (run["costs"].get(name) for run in results.runs_of(name) if "costs" in run)
        sampled = results.run["options"]["temperature"] > 0
        rows.append({
            "contender": name, "prompts": sums["prompts"],
            "same": None if sampled else sums["prompts"] - sum(len(turn["differ"]) for turn in turns),
            "accepted": bootstrap(lambda accepted, steps: accepted / steps, *counts),
            "drafted": drafted / steps,
            "rate": accepted / drafted if drafted else None,
            "length": 1 + accepted / sums["drafts"] if sums["drafts"] else None,
            "repeated": sums["repeated_4_grams"] / max(sums["all_4_grams"], 1),
            "cost": next((cost for cost in costs if cost is not None), None),
        })  # fmt: skip
    return rows


def report(runs: Sequence[Measured]) -> str:
    """Markdown: a table per temperature, and one by the prompts' categories if they have any."""
    return "\n\n".join([*(text for results in runs for text in (table(results), by_category(results)) if text), LEGEND])


def by_category(results: Measured) -> str:
    """Markdown: accepted drafts per step, a row per contender and a column per category."""
    rows: dict[str, dict[str, list[Turn]]] = {}
    for name in results.contenders:
        for turn in _turns(results, name).values() if name != BASE else ():
            rows.setdefault(name, {}).setdefault(turn.get("category", ""), []).append(turn)
    categories = sorted({category for row in rows.values() for category in row})
    if len(categories) < 2:
        return ""
    accepted = [
        [name, *(f"{_accepted(row[category]):.2f}" if category in row else "-" for category in categories)]
        for name, row in rows.items()
    ]
    return markdown(["accepted per step", *categories], accepted)


def _accepted(turns: list[Turn]) -> float:
    return sum(turn["accepted_tokens"] for turn in turns) / sum(turn["steps"] for turn in turns)


def by_position(results: Measured) -> dict[str, dict[float, Estimate]]:
    """Share of steps in which the drafts up to the first, second, ... position were accepted, by contender.

    Steps without drafts count, so that methods that draft in some steps only can be compared with others.
    """
    shares: dict[str, dict[float, Estimate]] = {}
    for name in results.contenders:
        counted = [turn for turn in _turns(results, name).values() if "accepted_lengths" in turn]
        steps = [turn["steps"] for turn in counted]
        for position in range(1, max((len(turn["accepted_lengths"]) for turn in counted), default=0)):
            at_least = [sum(turn["accepted_lengths"][position:]) for turn in counted]
            share = bootstrap(lambda accepted, steps: accepted / steps, at_least, steps)
            shares.setdefault(name, {})[position] = share
    return shares


def table(results: Measured) -> str:
    """Markdown: a row per contender."""
    run, options = results.run, results.run["options"]
    top_p = f", top-p {options['top_p']:g}" if options["temperature"] and options["top_p"] < 1 else ""
    about = (
        f"{options['model']}, {options['dtype']}, {run['task']} ({run['prompts']} prompts, {run['left_out']} longer "
        f"ones left out), {options['new_tokens']} tokens, temperature {options['temperature']:g}{top_p}, "
        f"{options['drafts']} drafts in every step; {run['machine']}"
    )
    return "\n".join([about, "", cells(rows_of(results), COLUMNS), *results.notes])


def headline(runs: Sequence[Measured]) -> str:
    """Markdown: accepted drafts per step by temperature, and their cost, a row per contender."""
    columns: dict[str, dict[str, str]] = {}  # by temperature, as a contender may lack some
    costs: dict[str, str] = {}
    for results in runs:
        temperature = results.run["options"]["temperature"]
        rows = [row for row in rows_of(results) if row["contender"] != BASE]
        column = columns.setdefault(f"accepted, T {temperature:g}" if temperature else "accepted, greedy", {})
        column |= {row["contender"]: row["accepted"].text("{:.2f}") for row in rows}
        costs |= {row["contender"]: number(row["cost"], "{:.2f}") for row in rows}
    lines = [[name, *(column.get(name, "-") for column in columns.values()), cost] for name, cost in costs.items()]
    return markdown(["drafts from", *columns, "cost, passes"], lines)


def costs(everyone: Iterable[Contender], target: str, trust_remote_code: bool = False) -> dict[str, float]:
    """Weights that the drafts of a step read, relative to a pass of the target, which reads all of its own once.

    Where memory bandwidth limits a step, as at batch 1, this is their time; launches and the host's work are left out.

    Args:
        everyone: contenders, the number of drafts in their speculative_config.
        target: folder.
        trust_remote_code: run code that comes with the target.

    Returns:
        Passes by the contender's name: of heads, EAGLE and n-gram; of none if the target is not on this disk,
        or is a mixture of experts.
    """
    from transformers import AutoConfig

    try:
        (layer, _), (lm_head, _) = weights_of(target)
    except HeadsError:
        return {}
    config = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code).get_text_config()
    whole = config.num_hidden_layers * layer + lm_head
    read = {
        contender.name: _read(contender.speculative_config or {}, layer, lm_head, config.vocab_size)
        for contender in everyone
    }
    return {name: round(numbers / whole, 4) for name, numbers in read.items() if numbers is not None}


def _read(options: dict[str, Any], layer: float, lm_head: float, vocab_size: int) -> float | None:
    """Numbers that the drafts of a speculative_config read; None if they are not counted."""
    n, method, folder = options.get("num_speculative_tokens", 0), options.get("method"), options.get("model")
    exit_layer = options.get("exit_layer")
    if method == "ngram":
        return 0.0
    if folder is None:
        return None
    if method == "eagle":
        return n * (_peer_weights(folder, vocab_size) + lm_head)
    if method not in (None, *METHODS) or not isinstance(exit_layer, int | None):
        return None
    heads = load_config(folder)
    vocabulary = options.get("draft_vocab_size", heads.draft_vocab_size) or vocab_size
    work = heads.work(n, vocabulary / vocab_size, exit_layer)
    return work.layers * layer + work.matrices * heads.target.hidden_size**2 + work.reads * lm_head


def _peer_weights(folder: str, vocab_size: int) -> float:
    """Numbers of a peer's checkpoint, apart from embeddings and LM heads."""
    numbers = 0
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(str(file), "pt") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 (no mapping)
        numbers += sum(math.prod(shape) for shape in shapes if vocab_size not in shape)
    return float(numbers)
