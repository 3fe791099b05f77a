# SPDX-License-Identifier: Apache-2.0
"""The tables of CP heads: losses against the joint, rows by rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads_folders import log_likelihood

from vllm_ppd.benchmarks.papers import cp
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.table import PaperTable
from vllm_ppd.heads.calibration.replay import accepted_by_position, replay


def rows_of(table: PaperTable) -> dict[str, tuple[Any, Any]]:
    return {row.label: (row.ours, row.theirs) for row in table.rows}


def test_accepted_drafts_by_position_add_up() -> None:
    accept, lengths = torch.rand(3, 9, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([10, 10, 4])
    counts, places = replay(accept, lengths), accepted_by_position(accept, lengths)
    assert sum(places) == pytest.approx(counts.accepted / counts.cycles) and places == sorted(places, reverse=True)
    assert accepted_by_position(accept * torch.tensor([0.0, 1.0, 1.0]), lengths) == [0, 0, 0]


def test_rows_are_by_rank(drafted: Context) -> None:
    rows = rows_of(cp.head_only(drafted))
    first, second, chain = "Rank 1 (cp-b), patterns", "Rank 1 (cp-c), patterns", "Rank 2 reading chain, patterns"
    assert list(rows) == [first, second, chain, "Rank 3", "Rank 5"]
    assert rows[first][1][:2] == (2.07, 1.52) and rows[second][1] is None and rows[chain][1] is None
    assert rows["Rank 3"] == (None, (1.88, 1.64, None, None, None, None))
    ours = rows[chain][0]
    assert ours[1] == pytest.approx(1 + ours[3] + ours[4]) and ours[5] == pytest.approx(3 * ours[0])


@pytest.mark.parametrize("place", [0, -1], ids=["rank 1", "rank 2, chain"])
def test_loss_is_that_of_the_joint(drafted: Context, place: int) -> None:
    heads = cp.all_heads(drafted)[place]
    target, n, lead = heads.calibration.target, heads.config.positions, heads.head.lead
    total, count = 0.0, 0
    for batch in drafted.windows(drafted.task):
        states = target.model(batch.input_ids, output_hidden_states=True).hidden_states[-1]
        for row, ids in zip(states, batch.input_ids, strict=True):
            following = ids.unfold(0, n, 1)[1:]
            row = row[: len(following)]
            seen = target.embed(following[:, : n - 1]) if lead else None
            joint, _ = log_likelihood(heads.head, row, following[:, lead:], target.unembedding, None, seen)
            first = (row @ target.unembedding.T).log_softmax(-1).gather(1, following[:, :lead])  # the target's
            total, count = total - float(joint.detach().sum() + first.sum()), count + len(following)
    assert cp.loss(drafted, heads, drafted.task) == pytest.approx(total / count / n, abs=1e-3)
