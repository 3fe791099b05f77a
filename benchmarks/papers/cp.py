# SPDX-License-Identifier: Apache-2.0
"""The tables of the paper on CP heads: loss and accepted drafts by rank (1 and 2), seconds of a forward pass (3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.harness.results import Row as Summary
from vllm_ppd.benchmarks.papers import Measure, PaperTable, Row, Value
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.cp_times import LONGEST, forward_times
from vllm_ppd.benchmarks.papers.published import CP as theirs
from vllm_ppd.heads.calibration.replay import accepted_by_position
from vllm_ppd.heads.calibration.run import Calibration
from vllm_ppd.heads.cp.calibration import acceptance, perplexities
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.cp.module import CPHead

KIND = "cp"
PAPER = "CP heads"
HOW = (
    "Loss is of the joint of the heads' n tokens on the given data, divided by n: the paper does not tell, and its "
    "values are of that size. Accepted: expected a pass along texts that the target sampled, the first draft counted, "
    "which is the token that the target samples itself and always accepted (Algorithm 1; the paper does not tell "
    "whether its averages count it). Drafts are of the whole vocabulary, one n-gram a pass."
)


@dataclass
class Given:
    """A folder of CP heads."""

    label: str  # its rank, and its name where there are several of that rank
    folder: str
    calibration: Calibration
    config: CPConfig
    head: CPHead


def given(context: Context) -> list[Given]:
    """All CP heads that were given, ranks ascending."""

    def make() -> list[Given]:
        found = []
        for folder in context.heads(KIND):
            calibration = context.calibration(folder)
            config, target = calibration.config, calibration.target
            assert isinstance(config, CPConfig)
            head = CPHead.from_tensors(calibration.tensors).to(target.device, target.dtype)
            found.append(Given("", folder, calibration, config, head))
        ranks = [heads.config.rank for heads in found]
        for heads in found:
            rank = heads.config.rank
            heads.label = f"Rank {rank}" + f" ({Path(heads.folder).name})" * (ranks.count(rank) > 1)
        return sorted(found, key=lambda heads: heads.config.rank)

    return context.once("cp heads", make)


def by_rank(context: Context, values: Callable[[Given], Sequence[Value]], published: dict[int, Any]) -> list[Row]:
    """A row a rank: ours beside the paper's, further heads of a rank after the first."""
    rows: list[tuple[int, Row]] = []
    there: set[int] = set()
    for heads in given(context):
        rank = heads.config.rank
        rows.append((rank, Row(heads.label, values(heads), None if rank in there else published.get(rank))))
        there.add(rank)
    rows += [(rank, Row(f"Rank {rank}", None, theirs_of)) for rank, theirs_of in published.items() if rank not in there]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def loss(context: Context, heads: Given) -> float:
    """Nats a token of the joint on the given data."""

    def make() -> float:
        c = heads.calibration
        found = perplexities(c.target, heads.head, c.windows, c.autocast)
        return float(found["joint_nats"]) / heads.config.positions

    return context.once(("cp loss", heads.folder), make)


def accepted(context: Context, heads: Given, sampled: bool = True) -> list[float]:
    """Accepted drafts a pass at positions 2 to n, on the target's sampled or greedy texts."""

    def make() -> list[float]:
        c = heads.calibration
        texts = c.sampled if sampled else c.greedy
        chances = acceptance(c.target, heads.head, texts, context.options.batch, c.autocast)
        return accepted_by_position(chances, texts.lengths.cpu())

    return context.once(("cp accepted", heads.folder, sampled), make)


def engines(context: Context) -> dict[str, Summary]:
    """Everyone of Table 1, sampling, one request at a time; who failed to start is missing."""

    def make() -> dict[str, Summary]:
        everyone = [Contender(BASE), Contender(CONTROL)]
        for heads in given(context):
            config = {
                "method": "cp", "model": heads.folder, "num_speculative_tokens": heads.config.positions - 1,
                "adaptive": False, "draft_vocab_size": heads.config.target.vocab_size,
            }  # fmt: skip
            if heads.config.counts_tensor is None:  # such heads draft from the whole vocabulary anyway
                del config["draft_vocab_size"]
            everyone.append(Contender(_name(heads), config))
        found = context.speeds(everyone, temperature=context.options.temperature)
        return {name: row for (name, _), row in found.items()}

    return context.once("cp engines", make)


def _name(heads: Given) -> str:
    return f"cp, {heads.label}"


def speculative(context: Context) -> PaperTable:
    found = engines(context)

    def values(heads: Given) -> list[Value]:
        row = found.get(_name(heads))
        timed: list[Value] = [None, None, None]
        if row is not None:
            timed = [1 / row["tokens_per_second"][0], row["speed_up"][0], context.quartiles(row)]
        return [loss(context, heads), 1 + sum(accepted(context, heads)), *timed]

    base, control = found[BASE], found.get(CONTROL)
    rows = [Row("vLLM, no heads", [None, None, 1 / base["tokens_per_second"][0], 1.0, None])]
    if control is not None:
        again = [1 / control["tokens_per_second"][0], control["speed_up"][0], context.quartiles(control)]
        rows.append(Row("vLLM, no heads, again", [None, None, *again]))
    published = {rank: (*values_of, None, None) for rank, values_of in theirs.FROM_SCRATCH.items()}
    rows += by_rank(context, values, published)
    return PaperTable(
        "cp-1", PAPER, "Table 1: results with the speculative decoding, by rank",
        ("Loss", "Avg. draft tokens accepted", "Time per token (with speculative decoding), s", "speed-up over vLLM",
         "quartiles"),
        tuple(rows),
        f"{HOW} Time: vLLM engines in turns, one request at a time, sampling at the same temperature. Theirs: a tiny "
        "transformer of 56.3M parameters trained from scratch on TinyStories with each rank; ours: heads on the given "
        "model, which stays as it was.",
        ("{:.2f}", "{:.2f}", "{:.4f}", "{:.3f}x", "{}"),
        context.settings("rounds", "prompts", "prompt_tokens", "new_tokens", "temperature", "engine_dtype", "eager"),
    )  # fmt: skip


def head_only(context: Context) -> PaperTable:
    most = max(heads.config.positions for heads in given(context))

    def values(heads: Given) -> list[Value]:
        places, n = accepted(context, heads), heads.config.positions
        whole = [loss(context, heads), 1 + sum(places), 1 + sum(accepted(context, heads, sampled=False))]
        return [*whole, *places, *[None] * (most - n), n * loss(context, heads)]

    positions = tuple(f"accepted at position {s}" for s in range(2, most + 1))
    published = {rank: (*values_of, *[None] * (most + 1)) for rank, values_of in theirs.HEAD_ONLY.items()}
    return PaperTable(
        "cp-2", PAPER, "Table 2: average number of accepted draft tokens, the head alone trained",
        ("Loss", "Average Draft Tokens Accepted", "of greedy texts", *positions, "joint, nats"),
        tuple(by_rank(context, values, published)),
        f"{HOW} Positions 2 to n add up to the average but for the first draft. Loops, which small models fall into, "
        "flatter greedy texts: see the share of repeated 4-grams. Theirs: PyCodeGPT on GitHub code, its head alone "
        "fine-tuned.",
        ("{:.2f}", "{:.2f}", "{:.2f}", *["{:.3f}"] * (most - 1), "{:.2f}"),
        context.settings("prompts", "prompt_tokens", "new_tokens", "temperature") | _loops(context),
    )  # fmt: skip


def _loops(context: Context) -> dict[str, str]:
    first = given(context)[0].calibration
    shares = first.greedy.repeated_4_grams(), first.sampled.repeated_4_grams()
    return {"repeated 4-grams": "{:.2f} greedy and {:.2f} sampled".format(*shares)}


def forward_pass(context: Context) -> PaperTable:
    everyone = given(context)
    calibration = everyone[0].calibration
    times = forward_times(calibration.target, {h.label: h.head for h in everyone}, calibration.autocast)
    nothing: list[Value] = [None] * len(theirs.FORWARD_COLUMNS)

    def values(heads: Given) -> list[Value]:
        return [times.bare, times.head[heads.label], times.full[heads.label], *nothing]

    published = {rank: (None, None, None, *row) for rank, row in theirs.FORWARD.items() if rank}
    rows = [Row("Barebone", [times.bare, None, times.bare, *nothing], (None, None, None, *theirs.FORWARD[0]))]
    rows += by_rank(context, values, published)
    forms = sorted({"factorised" if heads.config.factorised else "full" for heads in everyone})
    return PaperTable(
        "cp-3", PAPER, "Table 3: inference time for one forward pass, s",
        ("given model Barebone", "given model Head", "given model Full", *theirs.FORWARD_COLUMNS), tuple(rows),
        f"Ours: medians in turns of one pass over a sequence of {times.tokens} tokens (the paper: {LONGEST} to 4096), "
        "of the CP head with all its experts and positions on the last hidden state, and of both together; "
        "transformers' modules, no engine. Barebone is one measurement, whatever the rank. Ours are of the form "
        f"{' and '.join(forms)}; theirs are whole classifiers.",
        "{:.4f}", {"dtype": context.options.dtype, "device": calibration.target.device.type},
    )  # fmt: skip


TABLES: dict[str, Measure] = {"cp-1": speculative, "cp-2": head_only, "cp-3": forward_pass}
