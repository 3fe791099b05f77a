# SPDX-License-Identifier: Apache-2.0
"""The tables of the paper on CP heads: loss and accepted drafts by rank (1 and 2), seconds of a forward pass (3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_ppd.benchmarks.harness.contenders import BASE, CONTROL, Contender
from vllm_ppd.benchmarks.harness.results import Row as Summary
from vllm_ppd.benchmarks.papers import Measure, PaperTable, Row, Value, Verdict
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.cp_times import LONGEST, forward_times
from vllm_ppd.benchmarks.papers.intervals import over_texts, rises
from vllm_ppd.benchmarks.papers.ppd import loops
from vllm_ppd.benchmarks.papers.published import CP as theirs
from vllm_ppd.benchmarks.papers.tasks import Task
from vllm_ppd.heads.calibration.replay import accepted_by_position, replay
from vllm_ppd.heads.calibration.run import Calibration
from vllm_ppd.heads.cp.calibration import acceptance, perplexities
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.cp.module import CPHead

KIND = "cp"
PAPER = "CP heads"
HOW = (
    "Loss is of the joint of the heads' n tokens, on a task's texts or on the answers that the target samples, divided "
    "by n: the paper does not tell, and its values are of that size. Accepted: expected a pass along texts that the "
    "target sampled, the first draft counted, which is the token that the target samples itself and always accepted "
    "(Algorithm 1; the paper does not tell whether its averages count it). Drafts are of the whole vocabulary, one "
    "n-gram a pass. Heads that read the sampled token (reading token, chain) are no setting of the paper."
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
            reads = heads.config.condition
            heads.label = f"Rank {rank}" + f" reading {reads}" * (reads != "none")
            heads.label += f" ({Path(heads.folder).name})" * (ranks.count(rank) > 1)
        return sorted(found, key=lambda heads: heads.config.rank)

    return context.once("cp heads", make)


def by_rank(context: Context, values: Callable[[Given, Task], Sequence[Value]], published: dict[int, Any]) -> list[Row]:
    """A row a rank and task; beside the first of a rank stands the paper's."""
    rows: list[tuple[int, Row]] = []
    left = dict(published)
    for heads in given(context):
        rank = heads.config.rank
        for task in context.tasks:
            rows.append((rank, Row(f"{heads.label}, {task.name}", values(heads, task), left.pop(rank, None))))
    rows += [(rank, Row(f"Rank {rank}", None, theirs_of)) for rank, theirs_of in left.items()]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def likelihood(context: Context, heads: Given, task: Task) -> dict[str, Any]:
    """Perplexities of a head, and the joint's nats, on a task."""

    def make() -> dict[str, Any]:
        c = heads.calibration
        return perplexities(c.target, heads.head, context.windows(task), c.autocast)

    return context.once(("cp loss", heads.folder, task.name), make)


def loss(context: Context, heads: Given, task: Task) -> float:
    """Nats a token of the joint."""
    return float(likelihood(context, heads, task)["joint_nats"]) / heads.config.positions


def chances(context: Context, heads: Given, task: Task, sampled: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Of drafts 2 to n to be accepted [texts, places, n - 1], and lengths [texts], on sampled or greedy texts."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        c, texts = heads.calibration, context.sampled(task) if sampled else context.texts(task)
        found = acceptance(c.target, heads.head, texts, context.options.batch, c.autocast)
        return found, texts.lengths.cpu()

    return context.once(("cp accepted", heads.folder, task.name, sampled), make)


def gain(context: Context, task: Task, label: str, sampled: bool) -> list[Verdict]:
    """What a higher rank gets accepted over rank 1, the first draft counted; texts are resampled."""
    by_rank = {heads.config.rank: heads for heads in given(context)}
    claims = []
    for rank in sorted(set(by_rank) - {1}) if 1 in by_rank else ():
        pairs = [_counts(*chances(context, by_rank[one], task, sampled)) for one in (rank, 1)]
        found = over_texts(lambda a, m, b, n: (1 + a / m) / (1 + b / n) - 1, *pairs[0], *pairs[1])
        claims.append(
            rises("A higher rank gets more drafts accepted", f"{label}, rank {rank} over 1", found, "{:+.1%}")
        )
        first = [likelihood(context, by_rank[one], task)["ppl_n"][0] for one in (rank, 1)]
        told = f"{task.name}, perplexity at rank {rank}: {first[0]:.2f}, at rank 1: {first[1]:.2f}"
        claims.append(Verdict("The first token's loss is that of rank 1", abs(first[0] / first[1] - 1) < 0.02, told))
        less = [loss(context, by_rank[one], task) for one in (rank, 1)]
        told = f"{task.name}, rank {rank}: {less[0]:.3f} nats a token, rank 1: {less[1]:.3f}"
        claims.append(Verdict("A higher rank has a lower joint loss", less[0] < less[1], told))
    return claims


def _counts(chance: torch.Tensor, lengths: torch.Tensor) -> tuple[list[float], list[float]]:
    """Drafts accepted and passes, of each text."""
    each = [replay(chance[i : i + 1], lengths[i : i + 1]) for i in range(len(lengths))]
    return [one.accepted for one in each], [max(one.cycles, 1e-9) for one in each]


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

    def values(heads: Given, task: Task) -> list[Value]:
        row = found.get(_name(heads)) if task is context.task else None
        timed: list[Value] = [None, None, None]
        if row is not None:
            timed = [1 / row["tokens_per_second"][0], row["speed_up"][0], context.quartiles(row)]
        places = accepted_by_position(*chances(context, heads, task))
        return [loss(context, heads, task), 1 + sum(places), *timed]

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
        f"{HOW} Time: vLLM engines in turns, one request at a time, sampling at the same temperature, on "
        f"{context.task.name}. Theirs: a tiny transformer of 56.3M parameters trained from scratch on TinyStories with "
        "each rank; ours: heads on the given model, which stays as it was.",
        ("{:.2f}", "{:.2f}", "{:.4f}", "{:.3f}x", "{}"),
        context.settings("rounds", "prompts", "new_tokens", "temperature", "engine_dtype", "eager"),
    )  # fmt: skip


def head_only(context: Context) -> PaperTable:
    most = max(heads.config.positions for heads in given(context))

    def values(heads: Given, task: Task) -> list[Value]:
        n, nats = heads.config.positions, loss(context, heads, task)
        places, greedy = (accepted_by_position(*chances(context, heads, task, way)) for way in (True, False))
        return [nats, 1 + sum(places), 1 + sum(greedy), *places, *[None] * (most - n), n * nats]

    positions = tuple(f"accepted at position {s}" for s in range(2, most + 1))
    published = {rank: (*values_of, *[None] * (most + 1)) for rank, values_of in theirs.HEAD_ONLY.items()}
    claims = [
        claim for task in context.tasks for way, sampled in (("sampled", True), ("greedy", False))
        for claim in gain(context, task, f"{task.name}, {way}", sampled)
    ]  # fmt: skip
    return PaperTable(
        "cp-2", PAPER, "Table 2: average number of accepted draft tokens, the head alone trained",
        ("Loss", "Average Draft Tokens Accepted", "of greedy texts", *positions, "joint, nats"),
        tuple(by_rank(context, values, published)),
        f"{HOW} Positions 2 to n add up to the average but for the first draft. Loops, which small models fall into, "
        "flatter greedy texts: see the share of repeated 4-grams. Theirs: PyCodeGPT on GitHub code, its head alone "
        "fine-tuned.",
        ("{:.2f}", "{:.2f}", "{:.2f}", *["{:.3f}"] * (most - 1), "{:.2f}"),
        context.settings("prompts", "new_tokens", "temperature") | loops(context),
        claims=tuple(dict.fromkeys(claims)),
    )  # fmt: skip


def forward_pass(context: Context) -> PaperTable:
    everyone = given(context)
    calibration = everyone[0].calibration
    times = forward_times(calibration.target, {h.label: h.head for h in everyone}, calibration.autocast)
    nothing: list[Value] = [None] * len(theirs.FORWARD_COLUMNS)

    published = {rank: (None, None, None, *row) for rank, row in theirs.FORWARD.items()}
    rows = [Row("Barebone", [times.bare, None, times.bare, *nothing], published.pop(0))]
    for heads in everyone:
        ours = [times.bare, times.head[heads.label], times.full[heads.label], *nothing]
        rows.append(Row(heads.label, ours, published.pop(heads.config.rank, None)))
    rows += [Row(f"Rank {rank}", None, row) for rank, row in published.items()]
    added = {heads.label: times.full[heads.label] / times.bare - 1 for heads in everyone}
    told = ", ".join(f"{label}: {share:+.1%}" for label, share in added.items())
    claims = (Verdict("A head adds less than a quarter to a forward pass", max(added.values()) < 0.25, told),)
    forms = sorted({"factorised" if heads.config.factorised else "full" for heads in everyone})
    return PaperTable(
        "cp-3", PAPER, "Table 3: inference time for one forward pass, s",
        ("given model Barebone", "given model Head", "given model Full", *theirs.FORWARD_COLUMNS), tuple(rows),
        f"Ours: medians in turns of one pass over a sequence of {times.tokens} tokens (the paper: {LONGEST} to 4096), "
        "of the CP head with all its experts and positions on the last hidden state, and of both together; "
        "transformers' modules, no engine. Barebone is one measurement, whatever the rank. Ours are of the form "
        f"{' and '.join(forms)}; theirs are whole classifiers.",
        "{:.4f}", {"dtype": context.options.dtype, "device": calibration.target.device.type}, claims=claims,
    )  # fmt: skip


TABLES: dict[str, Measure] = {"cp-1": speculative, "cp-2": head_only, "cp-3": forward_pass}
