# SPDX-License-Identifier: Apache-2.0
"""Published speculators by every way in: taken as they are, or refused in a line before
a model loads.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Factory, patterned_texts, write_texts
from hub import running_hub, use
from published import LAYOUTS, publish
from refusals import (
    SERVE,
    Damage,
    Readers,
    command,
    config_text,
    edited,
    tensor,
    with_value,
)

from vllm_ppd.heads.calibration.options import CalibrationOptions
from vllm_ppd.heads.calibration.run import calibrate
from vllm_ppd.heads.io import load_config, load_tensors
from vllm_ppd.heads.kinds import recurrent
from vllm_ppd.vllm_plugins.cli.main import main
from vllm_ppd.vllm_plugins.config.options import OptionError

SERVERS = ("model alone", "--speculative-model")
HEAD = "speculator.head.0.weight"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_speculators_are_taken(
    readers: Readers,
    tmp_path: Path,
    layout: str,
    shards: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = publish(
        tmp_path / "recurrent", layout, "speculator.", shards, torch.bfloat16
    )
    for name in (*SERVERS, "inspect"):
        assert readers.refusal(name, str(folder)) is None, name
    config = load_config(folder)
    assert (
        config.num_speculative_tokens == LAYOUTS[layout]["n_predict"]
        and not config.names_target
    )
    for name in (SERVE, "calibrate"):
        assert "do not name their target" in str(readers.refusal(name, str(folder))), (
            name
        )
    command("inspect", str(folder), "--target", readers.model)
    assert main(["inspect", str(folder)]) == 0
    assert (
        "was not compared with its target, which it does not name"
        in capsys.readouterr().out
    )
    with pytest.raises(
        OptionError,
        match=r"needs token counts, which the heads in .* do not have; run `ppd "
        r"calibrate` on them first",
    ):
        readers.server(
            spec_model=str(folder), speculative_config={"draft_vocab_size": 64}
        )
    written = json.loads((folder / "config.json").read_text())
    assert written.items() <= {**config.to_json(), "dtype": "bfloat16"}.items()


@pytest.mark.parametrize(
    ("layout", "damage", "message"),
    [
        (
            "ibm",
            tensor(HEAD, with_value(float("nan"))),
            f"tensor '{HEAD}' has numbers that are not finite",
        ),
        (
            "ibm",
            tensor(HEAD, lambda head: head[:300]),
            r"'speculator.head.0.weight' has shape \[300, 24\], expected",
        ),
        (
            "ibm",
            tensor(HEAD, lambda head: head.to(torch.float8_e4m3fn)),
            "is of f8_e4m3, expected float32 or bfloat16",
        ),
        ("ibm", edited("n_predict", value=4), "has no tensor 'proj.3.weight'; write"),
        (
            "ibm",
            edited("n_predict", value=0),
            "num_speculative_tokens.*greater than or equal to 1|n_predict",
        ),
        ("ibm", edited("n_predict", value=...), "n_predict=None is not an integer"),
        ("ibm", edited("emb_dim", value=True), "emb_dim=True is not an integer"),
        (
            "ibm",
            edited("emb_dim", value=128),
            r"'speculator.proj.0.weight' has shape|hidden_size is 128 there, but 64",
        ),
        (
            "ibm",
            edited("vocab_size", value=640),
            "vocab_size is 640 there, but 320|has shape",
        ),
        ("ibm", edited("inner_dim", value=-1), "inner_dim=-1 is not a width"),
        (
            "ibm",
            edited("inner_dim", value=10**9),
            "inner_dim=1000000000 is not a width",
        ),
        (
            "ibm",
            edited("tie_weights", value="yes"),
            "tie_weights: Input should be a valid boolean",
        ),
        (
            "arctic-mlp",
            edited("inner_dim", value="24.24"),
            "inner_dim='24.24' has 2 layers; only heads with one",
        ),
        (
            "arctic-lstm",
            edited("inner_dim", value=[24, 24]),
            r"inner_dim=\[24, 24\] has 2 layers",
        ),
        (
            "arctic-lstm",
            edited("emb_dim", value="32"),
            "emb_dim='32' must be inner_dim=24",
        ),
        (
            "arctic-lstm",
            edited("tie_weights", value=False),
            "an LSTM whose heads do not share weights is not",
        ),
        (
            "arctic-lstm",
            edited("method", value="sum_gru"),
            "method: Input should be 'sum_rnn' or 'sum_lstm'",
        ),
        (
            "arctic-lstm",
            tensor("speculator.state_ln.0.bias", lambda bias: bias[:3]),
            "state_ln.0.bias' has shape",
        ),
        (
            "arctic-lstm",
            lambda folder: (folder / "model.safetensors").rename(
                folder / "pytorch_model.bin"
            ),
            "has no model.safetensors; save the heads as safetensors",
        ),
        (
            "ibm",
            config_text(b'{"model_type": "mlp_speculator"}'),
            "n_predict=None is not an integer",
        ),
    ],
)
def test_what_cannot_be_drafted_with_is_refused(
    readers: Readers, tmp_path: Path, layout: str, damage: Damage, message: str
) -> None:
    folder = publish(tmp_path / "recurrent", layout, "speculator.")
    damage(folder)
    for name in SERVERS:
        line = readers.refusal(name, str(folder))
        assert line is not None and re.search(message, line), f"{name}: {line}"


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({}, "has no weight_map; copy or write the heads again"),
        (
            {"weight_map": {"emb.0.weight": "../model.safetensors"}},
            "has no ../model.safetensors",
        ),
        ({"weight_map": {"emb.0.weight": "weights.bin"}}, "has no weights.bin"),
        (
            {"weight_map": {"emb.0.weight": "model-00009-of-00009.safetensors"}},
            "has no model-00009-of-00009.safetens",
        ),
    ],
)
def test_an_index_of_shards_that_is_damaged(
    readers: Readers, tmp_path: Path, places: Any, message: str
) -> None:
    folder = publish(tmp_path / "recurrent", "ibm", shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    for name in (*SERVERS, "inspect"):
        assert message in str(readers.refusal(name, str(folder))), name


@pytest.mark.parametrize("layout", ["ibm", "arctic-lstm"])
def test_calibration_adds_the_target_and_counts(
    readers: Readers, tiny_model: Factory, tmp_path: Path, layout: str
) -> None:
    """What was published stays as it is; every way in takes the folder then."""
    folder = publish(tmp_path / "recurrent", layout, shards=2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    data = write_texts(tmp_path / "data.jsonl", patterned_texts(20, 3))
    options: dict[str, Any] = {
        "prompts": 4,
        "prompt_tokens": 8,
        "new_tokens": 12,
        "device": "cpu",
    }
    result = calibrate(
        CalibrationOptions(
            heads=str(folder), data=(str(data),), model=str(tiny_model()), **options
        )
    )
    assert result["finished"] and set(result["parts"]) == {
        "timing",
        "acceptance",
        "vocabulary",
    }
    config, tensors = load_tensors(folder, recurrent.RecurrentConfig)
    assert config.names_target and config.verifier == str(tiny_model())
    assert tensors["token_counts"].sum() > 100
    after = json.loads((folder / "config.json").read_text())
    assert json.loads(before["config.json"]).items() <= after.items()
    assert all(
        (folder / name).read_bytes() == content
        for name, content in before.items()
        if name != "config.json"
    )
    for name in readers.of:
        assert readers.refusal(name, str(folder)) is None, name
    assert (
        readers.server(
            speculative_config={"model": str(folder), "draft_vocab_size": 64}
        ).draft_vocab_size
        == 64
    )


def test_shards_on_the_hub(
    readers: Readers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = publish(tmp_path / "recurrent", "arctic-lstm", "speculator.", 3)
    with running_hub() as hub:
        use(hub, tmp_path, monkeypatch)
        hub.add("acme/lstm", folder)
        command("inspect", "acme/lstm")
        assert (
            "not fetched" not in capsys.readouterr().out
            and hub.sent.get("model-00001-of-00003.safetensors", 0) > 0
        )
        assert readers.server(spec_model="acme/lstm").num_speculative_tokens == 3
        shutil.rmtree(folder)
        config, tensors = load_tensors(f"acme/lstm@{hub.commit('acme/lstm', 'main')}")
    assert tensors.keys() == config.shapes().keys()
