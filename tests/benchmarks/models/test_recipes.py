# SPDX-License-Identifier: Apache-2.0
"""The papers' recipes beside each other, on a tiny model: trained once, with a row each in the file of results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import patterned_texts, write_texts
from safetensors.torch import load_file

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.models import recipes


@pytest.fixture(scope="module")
def options(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recipes")
    data = str(write_texts(folder / "data.jsonl", patterned_texts(40, 4)))
    return {
        "model": str(tiny_model()), "data": (data,), "out": str(folder), "steps": 3,
        "batch_size": 2, "sequence_length": 32, "evaluation_tokens": 256, "results": str(folder / "results.json"),
    }  # fmt: skip


def rows_of(options: dict[str, Any], *names: str) -> dict[str, dict[str, Any]]:
    assert recipes.run(recipes.RecipesOptions(**options, only=names)) == 0
    written = json.loads(Path(options["results"]).read_text())
    assert written["machine"] and written["benchmark"] == "recipes"
    return {row["recipe"]: row for row in written["rows"]}


def test_heads_of_other_losses_and_sizes(options: dict[str, Any], tiny_model: Callable[..., Path]) -> None:
    rows = rows_of(options, "transform-kl", "classifier-ce", "t2", "t3-full", "t3-continued")
    assert "exit 3, kl_nats" in rows["transform-kl"] and "exit 3, ce_nats" in rows["classifier-ce"]
    assert "head 3 nats" not in rows["t2"]
    # Both move the base model, and the token heads' gradients make the difference.
    folder, name = Path(options["out"]), "model.layers.2.mlp.down_proj.weight"
    full, continued = (
        load_file(folder / base / "base" / "model.safetensors")[name] for base in ("t3-full", "t3-continued")
    )
    plain = load_file(tiny_model() / "model.safetensors")[name]
    assert not (full == plain).all() and not (continued == plain).all() and not (full == continued).all()
    stamp = (folder / "t2" / "model.safetensors").stat().st_mtime_ns
    assert rows_of(options, "t2") == {"t2": rows["t2"]}
    assert (folder / "t2" / "model.safetensors").stat().st_mtime_ns == stamp


def test_cp_heads_with_their_base(options: dict[str, Any]) -> None:
    """From scratch and jointly, whole and factorised, by balance."""
    rows = rows_of(options, "cp-joint-1", "cp-scratch-3-w*", "*-balance-1")
    assert rows.keys() == {"cp-scratch-3-whole", "cp-joint-1", "cp-scratch-8-balance-1"}
    for name, row in rows.items():
        trained = json.loads((Path(options["out"]) / name / "provenance.json").read_text())["options"]
        assert trained["base_start"] == ("trained" if name == "cp-joint-1" else "random")
        assert trained["factorised"] == ("whole" not in name)
        assert trained["balance"] == (1 if "balance" in name else 0.1)
        assert 1 / trained["rank"] <= row["largest share of an expert"] <= 1
        assert row["next_token_nats"] < 7 and row["tokens"] == 3 * 2 * 32


def test_names_of_no_recipe_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BenchError, match="names no recipe"):
        recipes.run(recipes.RecipesOptions(**options, only="nothing"))
