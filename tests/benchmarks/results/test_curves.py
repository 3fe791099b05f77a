# SPDX-License-Identifier: Apache-2.0
"""`ppd bench curves`: what is drawn of each kind of heads, and how flat the end is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import patterned_texts, write_texts

from vllm_ppd.benchmarks.results import curves
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.training.curve import Point
from vllm_ppd.heads.training.loop import train
from vllm_ppd.vllm_plugins.cli.main import main

SMALL = {
    "sequence_length": 32, "precision": "float32", "device": "cpu", "held_out": 0.1, "evaluation_tokens": 256,
    "steps": 3, "batch_size": 2, "evaluate_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with heads of two kinds."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_texts(folder / "data.jsonl", patterned_texts(40, 4))
    for kind, changes in (("early", {}), ("dynamo", {"tokens": 2})):
        options = {**SMALL, **changes, "model": str(tiny_model()), "data": (str(data),), "out": str(folder / kind)}
        train(KINDS[kind].options(**options))
    return folder


def test_curves(trained: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(trained / "early", tmp_path / "other")
    out = tmp_path / "curves.svg"
    assert main(["bench", "curves", "--heads", str(trained / "early"), str(tmp_path / "other"), "--out", str(out)]) == 0
    text, drawn = capsys.readouterr().out, out.read_text()
    for wanted in ("training loss", "held out: kl nats", "early exit 3", "other exit 5"):
        assert wanted in drawn
    last = json.loads((trained / "early" / "provenance.json").read_text())["held_out_after"]["exit 3"]["kl_nats"]
    (row,) = (line for line in text.splitlines() if "kl_nats, early exit 3" in line)
    assert f"{last:.4f}" in row
    assert main(["bench", "curves", "--heads", str(trained / "early"), str(trained / "dynamo"), "--out", str(out)]) == 2
    assert "are of kinds dynamo, early: draw each kind by itself" in capsys.readouterr().err
    (tmp_path / "other" / "curve.jsonl").unlink()
    with pytest.raises(TrainingError, match="have no curve"):
        curves.run(curves.CurvesOptions(heads=(str(tmp_path / "other"),), out=str(out)))


def test_what_is_drawn_of_each_kind() -> None:
    """As the papers' figures: CP joint and first token, early heads by exit, DynaMo by token head."""
    held_out = {
        "cp": {"joint_nats": 5.0, "joint_nats_a_token": 1.2, "conditional_nats_by_position": [2.0, 3.0],
               "share_of_experts": [0.5, 0.5], "first_position": 1},
        "cp, condition": {"joint_nats": 3.0, "conditional_nats_by_position": [3.0], "first_position": 2},
        "early": {"exit 3": {"kl_nats": 1.0, "match": 0.3}},
        "dynamo": {"head 1 nats": 2.0, "head 2 nats": 3.0, "head 2 distilled_nats": 2.5},
    }  # fmt: skip
    expected = {
        "cp": {("joint_nats", ""), ("conditional_nats_by_position", "position 1"),
               ("conditional_nats_by_position", "position 2")},
        "cp, condition": {("joint_nats", ""), ("conditional_nats_by_position", "position 2")},
        "early": {("kl_nats", "exit 3"), ("match", "exit 3")},
        "dynamo": {("nats", "head 1"), ("nats", "head 2"), ("distilled_nats", "head 2")},
    }  # fmt: skip
    for kind, figures in held_out.items():
        points = [Point(step=step, tokens=100 * step, held_out=figures) for step in (0, 1, 2)]
        found = {(one.panel, one.label) for one in curves.series(points, "") if one.panel != curves.TRAINING}
        assert found == {(f"held out: {panel}", label) for panel, label in expected[kind]}


def test_how_flat_the_end_is() -> None:
    points = [Point(step=step, tokens=10 * step, held_out={"nats": 10.0 - step}) for step in range(9)]
    row = curves.row_of(list(curves.series(points, "a"))[1])
    assert row == ["held out: nats, a", "10.0000", "2.0000", "2.0000 (50.0%)"]
