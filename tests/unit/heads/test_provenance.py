# SPDX-License-Identifier: Apache-2.0
"""The model card of a heads folder: what it says, and that a user's own words stay."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import Factory
from huggingface_hub import ModelCard

from vllm_ppd.heads.folder import load_config
from vllm_ppd.heads.provenance import CARD_NAME, write_card

FACTS = {
    "command": "ppd train cp --model /secret/model",
    "time": "2030-01-01T00:00:00Z",
    "tokens": 4096,
    "options": {"license": "apache-2.0"},
}


@pytest.fixture
def folder(whole_heads: Factory, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_heads("cp"), tmp_path / "cp"))


def test_card_of_heads_that_were_trained(folder: Path) -> None:
    config = load_config(folder).model_copy(update={"verifier": "acme/target"})
    (folder / "provenance.json").write_text(json.dumps(FACTS))
    write_card(folder, config)
    card = ModelCard.load(folder / CARD_NAME)
    assert (card.data.license, card.data.base_model) == (
        "apache-2.0",
        "acme/target",
    )
    served = "vllm serve acme/target --speculative-model"
    layout = "speculators' layout, read by vllm-ppd"
    for part in (served, "4096", layout):
        assert part in card.text, part
    assert "/secret" not in card.text and "Not calibrated" in card.text


def test_base_model_of_a_folder_in_the_hubs_cache(folder: Path) -> None:
    cached = "/cache/hub/models--acme--target-1B/snapshots/0123abcd"
    config = load_config(folder).model_copy(update={"verifier": cached})
    write_card(folder, config)
    assert ModelCard.load(folder / CARD_NAME).data.base_model == "acme/target-1B"


def test_what_a_user_wrote_stays(folder: Path) -> None:
    config = load_config(folder)
    write_card(folder, config)
    path = folder / CARD_NAME
    assert config.verifier not in path.read_text(), "folders of this disk"
    edited = path.read_text().replace("license: other", "license: mit")
    path.write_text(f"{edited}\nMy own words.\n")
    write_card(folder, config, "a report")
    card = path.read_text()
    assert "license: mit" in card and card.endswith("My own words.\n")
    assert "a report" in card and "Not calibrated" not in card
    path.write_text("no marks")
    write_card(folder, config)
    assert path.read_text() == "no marks"
