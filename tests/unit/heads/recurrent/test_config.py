# SPDX-License-Identifier: Apache-2.0
"""Published speculators by every way in: taken as they are, or refused in a line before
a model loads.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Factory, patterned_texts, write_texts
from hub import running_hub
from published import LAYOUTS, publish
from refusals import (
    SERVE,
    Damage,
    Readers,
    command,
    edited,
    tensor,
)

from vllm_ppd.heads.calibration.run import calibrate
from vllm_ppd.heads.folder import load_config, load_tensors
from vllm_ppd.heads.kinds import recurrent
from vllm_ppd.heads.options import CalibrationOptions
from vllm_ppd.vllm_plugins.cli.main import main
from vllm_ppd.vllm_plugins.config.options import OptionError

WITH_TARGET = ("model alone", "--speculative-model", "inspect")
HEAD = "speculator.head.0.weight"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_speculators_are_taken(
    readers: Readers,
    tmp_path: Path,
    layout: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    published = publish(
        tmp_path / "recurrent", layout, "speculator.", 3, torch.bfloat16
    )
    folder = str(published)
    readers.assert_taken(folder, *WITH_TARGET)
    config = load_config(folder)
    assert config.num_speculative_tokens == LAYOUTS[layout]["n_predict"]
    message = "do not name their target"
    readers.assert_refused(message, folder, SERVE, "calibrate")
    assert main(["inspect", folder]) == 0
    assert "which it does not name" in capsys.readouterr().out
    with pytest.raises(OptionError, match="run `ppd calibrate` on them first"):
        readers.server(
            spec_model=folder, speculative_config={"draft_vocab_size": 64}
        )
    written = json.loads((published / "config.json").read_text())
    assert written.items() <= {**config.to_json(), "dtype": "bfloat16"}.items()


@pytest.fixture
def refused(readers: Readers, tmp_path: Path) -> Factory:
    """refused(layout, damage, message): a published folder, damaged."""

    def check(
        layout: str,
        damage: Damage,
        message: str,
    ) -> None:
        folder = publish(
            tmp_path / "recurrent",
            layout,
            "speculator.",
        )
        damage(folder)
        readers.assert_refused(message, folder, *WITH_TARGET)

    return check


@pytest.mark.parametrize(
    ("layout", "key", "value", "message"),
    [
        ("ibm", "n_predict", 4, "no tensor 'proj.3.weight'; train"),
        ("ibm", "n_predict", 0, "greater than or equal to 1"),
        ("ibm", "n_predict", ..., "n_predict=None is not an integer"),
        ("ibm", "emb_dim", 128, "has shape|hidden_size is 128 there, but 64"),
        ("ibm", "vocab_size", 640, "has shape|vocab_size is 640 there, but 320"),
        ("ibm", "inner_dim", -1, "inner_dim=-1 is not a width"),
        (
            "ibm",
            "tie_weights",
            "yes",
            "tie_weights=.*: must be a valid boolean",
        ),
        ("arctic-mlp", "inner_dim", "24.24", "has 2 layers; only heads with one"),
        (
            "arctic-lstm",
            "inner_dim",
            [24, 24],
            r"inner_dim=\[24, 24\] has 2 layers",
        ),
        ("arctic-lstm", "emb_dim", "32", "emb_dim='32' must be inner_dim=24"),
        ("arctic-lstm", "tie_weights", False, "do not share weights is not"),
        ("arctic-lstm", "method", "sum_gru", "must be 'sum_rnn' or 'sum_lstm'"),
    ],
)
def test_configurations_that_cannot_be_drafted_with(
    refused: Factory, layout: str, key: str, value: Any, message: str
) -> None:
    refused(layout, edited(key, value=value), message)


def indexed(places: Any) -> Damage:
    """An index of shards in place of the weights."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(places))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            tensor(HEAD, lambda head: head.to(torch.float8_e4m3fn)),
            "is of float8_e4m3fn, expected float32 or bfloat16",
        ),
        (indexed({}), "has no weight_map; copy or write the heads again"),
        (
            indexed({"weight_map": {"a": "../model.bin"}}),
            r"has no \.\./model.bin",
        ),
    ],
)
def test_damaged_weights(
    refused: Factory,
    damage: Damage,
    message: str,
) -> None:
    refused("ibm", damage, message)


@pytest.mark.parametrize("layout", ["ibm", "arctic-lstm"])
def test_calibration_adds_the_target_and_counts(
    readers: Readers, tiny_model: Factory, tmp_path: Path, layout: str
) -> None:
    """What was published stays as it is; every way in takes the folder then."""
    folder = publish(tmp_path / "recurrent", layout, shards=2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    data = write_texts(tmp_path / "data.jsonl", patterned_texts(20, 3))
    options: dict[str, Any] = {
        "num_prompts": 4,
        "prompt_tokens": 8,
        "output_len": 12,
    }
    calibrate(
        CalibrationOptions(
            heads=str(folder),
            data=(str(data),),
            model=str(tiny_model()),
            **options,
        )
    )
    config, tensors = load_tensors(folder, recurrent.RecurrentConfig)
    assert config.names_target and config.verifier == str(tiny_model())
    assert tensors["token_counts"].sum() > 100
    after = {name: (folder / name).read_bytes() for name in before}
    published, written = (
        json.loads(before.pop("config.json")),
        after["config.json"],
    )
    assert published.items() <= json.loads(written).items()
    assert before.items() <= after.items()
    readers.assert_taken(folder)
    asked = {"model": str(folder), "draft_vocab_size": 64}
    assert readers.server(speculative_config=asked).draft_vocab_size == 64


def test_shards_on_the_hub(
    readers: Readers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = publish(
        tmp_path / "recurrent",
        "arctic-lstm",
        "speculator.",
        3,
    )
    with running_hub(tmp_path, monkeypatch) as hub:
        hub.add("acme/lstm", folder)
        command("inspect", "acme/lstm")
        assert readers.server(spec_model="acme/lstm").num_speculative_tokens == 3
        shutil.rmtree(folder)
        config, tensors = load_tensors(
            f"acme/lstm@{hub.commit('acme/lstm', 'main')}"
        )
    assert tensors.keys() == config.shapes().keys()
