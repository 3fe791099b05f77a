# SPDX-License-Identifier: Apache-2.0
"""The papers' recipes beside each other, on a tiny model: each trained once."""

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
        "batch_size": 2, "sequence_length": 32, "evaluation_tokens": 256,
    }  # fmt: skip


def trained(options: dict[str, Any], *names: str) -> dict[str, dict[str, Any]]:
    """What is written of the recipes of these names or patterns."""
    assert recipes.run(recipes.RecipesOptions(**options, only=names)) == 0
    folders = {path.parent for name in names for path in Path(options["out"]).glob(f"{name}/provenance.json")}
    return {folder.name: json.loads((folder / "provenance.json").read_text()) for folder in folders}


def test_heads_of_other_losses_and_sizes(options: dict[str, Any], tiny_model: Callable[..., Path]) -> None:
    facts = trained(options, "transform-kl", "classifier-ce", "t2", "t3-full", "t3-continued")
    held_out = {name: written["held_out_after"] for name, written in facts.items()}
    assert "kl_nats" in held_out["transform-kl"]["exit 3"] and "ce_nats" in held_out["classifier-ce"]["exit 3"]
    assert "head 3 nats" not in held_out["t2"]
    # Both move the base model, and the token heads' gradients make the difference.
    folder, name = Path(options["out"]), "model.layers.2.mlp.down_proj.weight"
    full, continued = (
        load_file(folder / base / "base" / "model.safetensors")[name] for base in ("t3-full", "t3-continued")
    )
    plain = load_file(tiny_model() / "model.safetensors")[name]
    assert not (full == plain).all() and not (continued == plain).all() and not (full == continued).all()
    stamp = (folder / "t2" / "model.safetensors").stat().st_mtime_ns
    assert trained(options, "t2") == {"t2": facts["t2"]}
    assert (folder / "t2" / "model.safetensors").stat().st_mtime_ns == stamp


def test_cp_heads_with_their_base(options: dict[str, Any]) -> None:
    """From scratch and jointly, whole and factorised, by balance."""
    facts = trained(options, "cp-joint-1", "cp-scratch-3-w*", "*-balance-1")
    assert facts.keys() == {"cp-scratch-3-whole", "cp-joint-1", "cp-scratch-8-balance-1"}
    for name, written in facts.items():
        asked, held_out = written["options"], written["held_out_after"]
        assert asked["base_start"] == ("trained" if name == "cp-joint-1" else "random")
        assert asked["factorised"] == ("whole" not in name)
        assert asked["balance"] == (1 if "balance" in name else 0.1)
        assert 1 / asked["rank"] <= max(held_out["share_of_experts"]) <= 1
        assert held_out["next_token_nats"] < 7 and written["tokens"] == 3 * 2 * 32


def test_names_of_no_recipe_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BenchError, match="names no recipe"):
        recipes.run(recipes.RecipesOptions(**options, only="nothing"))
