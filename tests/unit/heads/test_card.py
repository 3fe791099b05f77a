# SPDX-License-Identifier: Apache-2.0
"""The model card of a heads folder: what it says, and that a user's own words stay."""

import json
import shutil
from pathlib import Path

import heads_folders
import pytest
from conftest import ROOT, Factory
from huggingface_hub import ModelCard

from vllm_ppd.heads.card import BEGIN, END, NAME, write_card
from vllm_ppd.heads.io import load_config

FACTS = {
    "command": "ppd train cp --model /secret/model", "time": "2030-01-01T00:00:00Z", "tokens": 4096, "steps": 2,
    "options": {"license": "apache-2.0", "learning_rate": 0.001, "seed": 0},
    "held_out_before": {"loss": 5.5}, "held_out_after": {"loss": 4.25},
}  # fmt: skip


@pytest.mark.parametrize("kind", heads_folders.KINDS)
def test_card_of_heads_that_were_trained(kind: str, whole_heads: Factory, tmp_path: Path) -> None:
    folder = shutil.copytree(whole_heads(kind), tmp_path / kind)
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "acme/target"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "provenance.json").write_text(json.dumps(FACTS))
    write_card(folder, load_config(folder))
    card = ModelCard.load(folder / NAME)
    assert (card.data.license, card.data.base_model, card.data.library_name) == ("apache-2.0", "acme/target", "vllm")
    assert {"speculative-decoding", kind} <= set(card.data.tags)
    for part in ("vllm serve acme/target --speculative-model", "4096", "4.25", "5.5", "Not calibrated"):
        assert part in card.text, part
    assert "/secret" not in card.text


def test_card_of_heads_of_unknown_origin(whole_heads: Factory, tmp_path: Path) -> None:
    """Made by hand, for a target that was a folder somewhere: what is not known is not claimed."""
    folder = shutil.copytree(whole_heads("cp"), tmp_path / "cp")
    write_card(folder, load_config(folder))
    card = ModelCard.load(folder / NAME)
    assert (card.data.license, card.data.base_model) == ("other", None)
    assert "Not known." in card.text
    target = json.loads((folder / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"]
    assert target not in card.content and Path(target).name in card.content


def test_what_a_user_wrote_stays(whole_heads: Factory, tmp_path: Path) -> None:
    folder = shutil.copytree(whole_heads("cp"), tmp_path / "cp")
    write_card(folder, load_config(folder))
    path = folder / NAME
    edited = path.read_text().replace("license: other", "license: mit").replace("Not known.", "stale")
    path.write_text(f"{edited}\nMy own words.\n")
    write_card(folder, load_config(folder))
    assert "license: mit" in path.read_text() and path.read_text().endswith("My own words.\n")
    assert "stale" not in path.read_text()
    for text in ("no marks", f"{END} turned round {BEGIN}", f"{BEGIN} and no end"):
        path.write_text(text)
        write_card(folder, load_config(folder))
        assert path.read_text() == text


@pytest.mark.parametrize("kind", heads_folders.OF_DEMO)
def test_cards_of_the_demo_heads(kind: str) -> None:
    """Written with their calibration."""
    text = (ROOT / "benchmarks" / "demo" / "heads" / kind / NAME).read_text()
    assert f"# {kind} heads for" in text and "Recommended (sampled texts" in text
