# SPDX-License-Identifier: Apache-2.0
"""The table of the paper on CP heads: loss and accepted drafts by rank (2, and 1 but for the time of a token)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_ppd.benchmarks.harness.estimates import bootstrap
from vllm_ppd.benchmarks.papers.context import Context, loops, once
from vllm_ppd.benchmarks.papers.table import PaperTable, Row, Value, Verdict, paper_table, published, rises
from vllm_ppd.benchmarks.papers.tasks import Task
from vllm_ppd.heads.calibration.replay import accepted_by_position, replay
from vllm_ppd.heads.calibration.session import Calibration
from vllm_ppd.heads.cp.calibration import CPMeasures
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.cp.module import CPHead

KIND = "cp"
theirs = published("cp")


@dataclass(eq=False)
class CPHeads:
    """A folder of CP heads."""

    label: str  # its rank, and its name where there are several of that rank
    folder: str
    calibration: Calibration
    config: CPConfig
    head: CPHead

    @property
    def measures(self) -> CPMeasures:
        return CPMeasures(self.calibration.target, self.head, self.calibration.autocast)


@once
def all_heads(context: Context) -> list[CPHeads]:
    """All CP heads of the options, ranks ascending."""
    heads = []
    for folder in context.heads(KIND):
        calibration = context.calibration(folder)
        config, target = calibration.config, calibration.target
        assert isinstance(config, CPConfig)
        head = CPHead.from_tensors(config, calibration.tensors).to(target.device, target.dtype)
        label = f"Rank {config.rank}" + f" reading {config.condition}" * (config.condition != "none")
        heads.append(CPHeads(label, folder, calibration, config, head))
    ranks = [of_rank.config.rank for of_rank in heads]
    for of_rank in heads:
        of_rank.label += f" ({Path(of_rank.folder).name})" * (ranks.count(of_rank.config.rank) > 1)
    return sorted(heads, key=lambda of_rank: of_rank.config.rank)


def by_rank(
    context: Context, values: Callable[[CPHeads, Task], Sequence[Value]], by_paper: dict[int, Any]
) -> list[Row]:
    """A row a rank and task; beside the first of a rank stands the paper's."""
    left = dict(by_paper)
    rows = [
        (heads.config.rank, Row(f"{heads.label}, {task.name}", values(heads, task), left.pop(heads.config.rank, None)))
        for heads in all_heads(context) for task in context.tasks
    ]  # fmt: skip
    rows += [(rank, Row(f"Rank {rank}", None, of_paper)) for rank, of_paper in left.items()]
    return [row for _, row in sorted(rows, key=lambda ranked: ranked[0])]


@once
def likelihood(context: Context, heads: CPHeads, task: Task) -> dict[str, Any]:
    """Perplexities of a head, and the joint's nats, on a task."""
    return heads.measures.perplexities(context.windows(task))


def loss(context: Context, heads: CPHeads, task: Task) -> float:
    """Nats a token of the joint."""
    return float(likelihood(context, heads, task)["joint_nats"]) / heads.config.positions


@once
def chances(context: Context, heads: CPHeads, task: Task, sampled: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Of drafts 2 to n to be accepted [texts, places, n - 1], and lengths [texts], on sampled or greedy texts."""
    texts = context.sampled(task) if sampled else context.texts(task)
    return heads.measures.acceptance(texts, context.options.batch), texts.lengths.cpu()


def gain(context: Context, task: Task, label: str, sampled: bool) -> list[Verdict]:
    """What a higher rank gets accepted over rank 1, the first draft counted; texts are resampled."""
    of_rank = {heads.config.rank: heads for heads in all_heads(context)}
    claims = []
    for rank in sorted(set(of_rank) - {1}) if 1 in of_rank else ():
        higher, first = of_rank[rank], of_rank[1]
        more = bootstrap(
            lambda a, m, b, n: (1 + a / m) / (1 + b / n) - 1,
            *_counts(*chances(context, higher, task, sampled)), *_counts(*chances(context, first, task, sampled)),
        )  # fmt: skip
        nexts = [likelihood(context, heads, task)["ppl_n"][0] for heads in (higher, first)]
        losses = [loss(context, heads, task) for heads in (higher, first)]
        claims += [
            rises("A higher rank gets more drafts accepted", f"{label}, rank {rank} over 1", more, "{:+.1%}"),
            Verdict("The first token's loss is that of rank 1", abs(nexts[0] / nexts[1] - 1) < 0.02,
                    f"{task.name}, perplexity at rank {rank}: {nexts[0]:.2f}, at rank 1: {nexts[1]:.2f}"),
            Verdict("A higher rank has a lower joint loss", losses[0] < losses[1],
                    f"{task.name}, rank {rank}: {losses[0]:.3f} nats a token, rank 1: {losses[1]:.3f}"),
        ]  # fmt: skip
    return claims


def _counts(chance: torch.Tensor, lengths: torch.Tensor) -> tuple[list[float], list[float]]:
    """Drafts accepted and passes, of each text."""
    texts = [replay(chance[i : i + 1], lengths[i : i + 1]) for i in range(len(lengths))]
    return [counts.accepted for counts in texts], [max(counts.cycles, 1e-9) for counts in texts]


def head_only(context: Context) -> PaperTable:
    """Table 2."""
    most = max(heads.config.positions for heads in all_heads(context))

    def values(heads: CPHeads, task: Task) -> list[Value]:
        n, nats = heads.config.positions, loss(context, heads, task)
        places, greedy = (accepted_by_position(*chances(context, heads, task, sampled)) for sampled in (True, False))
        return [nats, 1 + sum(places), 1 + sum(greedy), *places, *[None] * (most - n), n * nats]

    positions = [f"accepted at position {s}" for s in range(2, most + 1)]
    claims = [
        claim for task in context.tasks for texts, sampled in (("sampled", True), ("greedy", False))
        for claim in gain(context, task, f"{task.name}, {texts}", sampled)
    ]  # fmt: skip
    return paper_table(
        "cp-2", by_rank(context, values, theirs.HEAD_ONLY), claims=claims,
        columns=["Loss", "Average Draft Tokens Accepted", "of greedy texts", *positions, "joint, nats"],
        forms=["{:.2f}", "{:.2f}", "{:.2f}", *["{:.3f}"] * (most - 1), "{:.2f}"],
        settings=context.settings("prompts", "new_tokens", "temperature") | loops(context),
    )  # fmt: skip


TABLES = {"cp-2": head_only}
