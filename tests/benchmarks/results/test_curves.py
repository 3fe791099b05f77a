# SPDX-License-Identifier: Apache-2.0
"""`ppd bench curves` and the comparison of the papers' recipes, on runs of a tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import patterned_texts, write_texts
from safetensors.torch import load_file

from vllm_ppd.benchmarks.models import recipes
from vllm_ppd.benchmarks.results import curves
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.training.curve import Point
from vllm_ppd.vllm_plugins.cli.main import main

SMALL = {
    "sequence_length": 32, "precision": "float32", "device": "cpu", "held_out": 0.1, "evaluation_tokens": 256,
    "steps": 3, "batch_size": 2, "evaluate_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("recipes")
    data = write_texts(folder / "data.jsonl", patterned_texts(40, 4))

    def run(*names: str) -> tuple[Path, str]:
        given = {**SMALL, "model": str(tiny_model()), "data": (str(data),)}
        return folder, recipes.run(recipes.trained(names, folder, **given))

    return run


def test_recipes(trained: Any, tiny_model: Callable[..., Path]) -> None:
    folder, text = trained("transform-kl", "classifier-ce", "t2", "t4", "t3-full", "t3-continued")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    after = {(row[0], row[1]): float(row[3]) for row in rows}
    assert ("transform-kl", "exit 3, kl_nats") in after and ("classifier-ce", "exit 3, ce_nats") in after
    assert ("t2", "head 3 nats") not in after and ("t4", "head 4 nats") in after
    # Both move the base model, and the token heads' gradients make the difference.
    bases = [load_file(folder / name / "base" / "model.safetensors") for name in ("t3-full", "t3-continued")]
    plain = load_file(tiny_model() / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    assert not any((base[name] == plain[name]).all() for base in bases)
    assert not (bases[0][name] == bases[1][name]).all()
    stamp = (folder / "t2" / "model.safetensors").stat().st_mtime_ns
    again = [line.replace(" ", "") for line in trained("t2")[1].splitlines()[2:]]
    assert again == [line.replace(" ", "") for line in text.splitlines() if line.startswith("| t2")]
    assert (folder / "t2" / "model.safetensors").stat().st_mtime_ns == stamp


def test_cp_heads_with_their_base(trained: Any, tiny_model: Callable[..., Path], monkeypatch: Any) -> None:
    """From scratch and jointly, whole and factorised, by balance; drafts accepted; one row each in the file."""
    folder, _ = trained()
    names = ["cp-scratch-3-whole", "cp-joint-1", "cp-scratch-8-balance-1"]
    patterns = ["cp-joint-1", "cp-scratch-3-w*", "*-balance-1"]
    out, data = folder / "cp.json", str(folder / "data.jsonl")
    argv = ["--model", str(tiny_model()), "--data", data, "--out", str(folder), "--steps", "3", "--batch-size", "2"]
    argv += ["--sequence-length", "32", "--evaluation-tokens", "256", "--texts", data, "--prompts", "3", "--only"]
    monkeypatch.setattr("sys.argv", ["recipes.py", *argv, *patterns, "--json", str(out)])
    recipes.main()
    facts = json.loads(out.read_text())
    rows = {row["recipe"]: row for row in facts["rows"]}
    assert set(rows) == set(names) and facts["machine"]
    for name, row in rows.items():
        options = json.loads((folder / name / "provenance.json").read_text())["options"]
        assert options["recipe"] == "full" and options["distillation"] == 0
        assert options["base_start"] == ("trained" if name == "cp-joint-1" else "random")
        assert options["factorised"] == ("whole" not in name)
        assert options["balance"] == (1 if "balance" in name else 0.1)
        assert 0 <= row["accepted, T 1"] <= 3 and 1 / options["rank"] <= row["largest share of an expert"] <= 1
        assert row["next_token_nats"] < 7 and row["tokens"] == 3 * 2 * 32
    stamps = [(folder / name / "accepted.json").stat().st_mtime_ns for name in names]
    recipes.main()
    assert json.loads(out.read_text())["rows"] == facts["rows"]
    assert stamps == [(folder / name / "accepted.json").stat().st_mtime_ns for name in names]
    monkeypatch.setattr("sys.argv", ["recipes.py", *argv, "nothing"])
    with pytest.raises(SystemExit, match="names no recipe"):
        recipes.main()


def test_curves(trained: Any, tmp_path: Path, capsys: Any) -> None:
    folder, _ = trained("transform-kl", "t2")
    shutil.copytree(folder / "transform-kl", tmp_path / "other")
    out = tmp_path / "curves.svg"
    assert (
        main(["bench", "curves", "--heads", str(folder / "transform-kl"), str(tmp_path / "other"), "--out", str(out)])
        == 0
    )
    text, drawn = capsys.readouterr().out, out.read_text()
    for wanted in ("training loss", "held out: kl nats", "transform-kl exit 3", "other exit 5"):
        assert wanted in drawn
    last = json.loads((folder / "transform-kl" / "provenance.json").read_text())["held_out_after"]["exit 3"]["kl_nats"]
    (row,) = (line for line in text.splitlines() if "kl_nats, transform-kl exit 3" in line)
    assert f"{last:.4f}" in row
    assert (
        main(["bench", "curves", "--heads", str(folder / "transform-kl"), str(folder / "t2"), "--out", str(out)]) == 2
    )
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
    row = curves._row(list(curves.series(points, "a"))[1])
    assert row == ["held out: nats, a", "10.0000", "2.0000", "2.0000 (50.0%)"]
