# SPDX-License-Identifier: Apache-2.0
"""DynaMo's tables: perplexities against the published and along packed windows, and engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from vllm_ppd.benchmarks.papers import dynamo
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.dynamo import measures_of
from vllm_ppd.benchmarks.papers.run import make_tables
from vllm_ppd.benchmarks.papers.table import PaperTable
from vllm_ppd.heads.dynamo.config import JointSettings
from vllm_ppd.heads.training.tokens import Batch


def rows_of(table: PaperTable) -> dict[str, tuple[Any, Any]]:
    return {row.label: (row.ours, row.theirs) for row in table.rows}


def test_perplexities_stand_beside_the_papers(drafted: Context) -> None:
    suite, folder = rows_of(dynamo.suite(drafted)), drafted.heads("dynamo")[0]
    label = dynamo.name(drafted, folder)
    assert label == "DynaMo-T3, dynamo"
    ours, _ = suite[f"{label}, patterns"]
    assert list(ours[:3]) == measures_of(drafted, folder).perplexities(drafted.windows(drafted.task))["ppl_n"]
    assert suite["given model, patterns"][0][0] == ours[0] and suite["DynaMo-77M-T3"][1][2] == 262.0


def test_dynamic_perplexity_goes_on_at_the_next_document(drafted: Context) -> None:
    """A packed window of three documents counts what the documents count by themselves."""
    measures = measures_of(drafted, drafted.heads("dynamo")[0])
    settings, eps_b, lengths = JointSettings(k=6), (0.0, 0.3, 1.0), (9, 14, 7)
    generator = torch.Generator().manual_seed(2)
    alone = [torch.randint(0, tiny.VOCAB, (1, length), generator=generator) for length in lengths]
    places = [torch.arange(length)[None] for length in lengths]
    packed = [Batch(torch.cat(alone, dim=1), torch.cat(places, dim=1))]
    points = measures.dynamic_perplexity(packed, settings, eps_b)
    assert points == measures.dynamic_perplexity(list(map(Batch, alone, places)), settings, eps_b)
    # One token at a time, that is PPL_1 of the positions that have as many tokens after them as there are heads.
    first = measures.perplexities(packed)["ppl_n"][0]
    assert points[-1]["tokens_a_pass"] == 1 and points[-1]["ppl_d"] == pytest.approx(first, rel=1e-3)


@pytest.mark.full
def test_engines_are_measured(drafted: Context, tmp_path: Path) -> None:
    changes = {"out": str(tmp_path / "speeds.json"), "only": ("dynamo-4",), "heads": (drafted.heads("dynamo")[0],)}
    (table,), left_out = make_tables(drafted.options.model_copy(update=changes))
    turns = json.loads((tmp_path / "speeds.turns.json").read_text())
    assert not left_out and all(run["finished"] and not run["failures"] for run in turns["runs"])
    ours = {label: values for label, (values, _) in rows_of(table).items() if values is not None}
    assert len(ours) == 2 + len(dynamo.EPS_B) and all(values[0] > 0 for values in ours.values())
    assert any("verified: same quality" in claim.evidence for claim in table.claims)
    lengths = {label: values[2] for label, values in ours.items() if "unverified" in label}
    assert lengths["DynaMo-T3, dynamo, unverified, eps_b = 0"] > 1
