# SPDX-License-Identifier: Apache-2.0
"""The target that heads name: where it is looked for, how another is named, and how one
is told from another.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import heads_folders
import pytest
import torch
from conftest import ROOT, Factory, our_log
from refusals import edited
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from vllm import EngineArgs

from vllm_ppd.heads.calibration.run import checked, open_calibration
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.folder import load_config
from vllm_ppd.heads.options import CalibrationOptions
from vllm_ppd.heads.target import (
    check_target,
    find_target,
    fingerprint,
    stored_name,
)
from vllm_ppd.vllm_plugins.cli.main import main

DEMO = ROOT / "benchmarks" / "demo"


def test_targets_travel_with_a_checkout(
    tiny_model: Factory,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A relative path is looked for from the heads' folder upwards, from wherever it is asked."""
    checkout = tmp_path / "checkout"
    model = Path(shutil.copytree(tiny_model(), checkout / "models" / "tiny"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(checkout)
    assert stored_name("models/tiny", "heads/cp") == "models/tiny"
    assert stored_name("models/tiny", tmp_path / "elsewhere") == str(model)
    assert stored_name("org/name", "heads/cp") == "org/name"
    folder = heads_folders.make_heads(
        checkout / "heads" / "cp", "cp", Path("models/tiny")
    )
    assert find_target("models/tiny", folder) == "models/tiny"
    moved = tmp_path / "moved"
    checkout.rename(moved)
    folder = moved / "heads" / "cp"
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = str(moved / "models" / "tiny")
    assert main(["inspect", str(folder)]) == 0
    assert f"will load: yes, with {path}" in capsys.readouterr().out
    config = EngineArgs(model=str(folder), dtype="float32").create_engine_config()
    assert config.model_config.model == config.model_config.tokenizer == path


def test_a_target_that_is_nowhere(
    tiny_model: Factory, tmp_path: Path, capsys: Any
) -> None:
    """It is said which was looked for, and how to name another; naming another works."""
    folder = heads_folders.make_heads(tmp_path / "heads", "cp", tiny_model())
    name = ("speculators_config", "verifier", "name_or_path")
    edited(*name, value="some/old/path")(folder)
    missing = r"target 'some/old/path' of the heads in .*"
    with pytest.raises(HeadsError, match=f"{missing}--model"):
        checked(CalibrationOptions(heads=str(folder), data=("-",)))
    with pytest.raises(HeadsError, match=f"{missing}name it: vllm serve TARGET"):
        EngineArgs(model=str(folder)).create_engine_config()
    inspect = ["inspect", str(folder), "--model"]
    assert main([*inspect, str(tiny_model())]) == 0
    assert f"will load: yes, with {tiny_model()}" in capsys.readouterr().out
    assert main([*inspect, str(tiny_model("qwen2"))]) == 2


@pytest.mark.parametrize("kind", heads_folders.OF_DEMO)
def test_stored_fingerprints_hold(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = DEMO / "heads" / kind
    config = load_config(folder)
    assert find_target(config.verifier, folder) == str(DEMO / "model")
    assert config.fingerprint == fingerprint(DEMO / "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "hidden_size is 64 there, but 128 in this model"),
        ({"vocab_size": 32_000}, "vocab_size is 320 there, but 32000"),
        ({"num_hidden_layers": 8}, "num_hidden_layers is 6 there, but 8"),
        ({"vocabulary": "0"}, "the hash of its vocabulary differs"),
        ({"lm_head": "0"}, "its lm_head has other"),
    ],
)
def test_other_target_is_refused(
    heads_folder: Factory, tiny_model: Factory, changes: Any, message: str
) -> None:
    folder = heads_folder()
    config = load_config(folder)
    target = AutoConfig.from_pretrained(tiny_model(), **changes)
    known = config.fingerprint.model_copy(update=changes)
    with pytest.raises(
        HeadsError, match=f"{message}.*; use the heads of this model"
    ):
        check_target(
            config,
            folder,
            target,
            known,
            strict=True,
        )


def test_fine_tunes_are_warned_about(
    tiny_model: Factory, tmp_path: Path, capsys: Any
) -> None:
    """Drafts of other weights are verified, but unverified ones need the weights that
    heads were trained for.
    """
    other = Path(shutil.copytree(tiny_model(), tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"][0] += 0.01
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    heads = str(
        heads_folders.make_heads(tmp_path / "heads", "dynamo", tiny_model())
    )

    def serve(**options: Any) -> None:
        asked = {"model": heads, **options}
        args = EngineArgs(
            model=str(other), dtype="float32", speculative_config=asked
        )
        args.create_engine_config()

    differs = (
        "its lm_head has other values (a fine-tune, or a copy in another dtype)"
    )
    with our_log() as said:
        serve()
    (line,) = said
    assert differs in line
    assert main(["inspect", heads, "--model", str(other)]) == 0
    assert f"{differs}. Drafts are verified" in capsys.readouterr().out
    refused = f"{re.escape(differs)}; use the heads"
    with pytest.raises(HeadsError, match=refused):
        serve(verify=False)
    options = CalibrationOptions(
        heads=heads, data=("-",), model=str(other), device="cpu"
    )
    assert open_calibration(options).target.name == str(other)
    warning = capsys.readouterr().err
    assert "vllm-ppd: warning: heads in" in warning and differs in warning


def test_the_lm_head_is_told_by_values_shape_and_dtype(tmp_path: Path) -> None:
    def hashed(values: torch.Tensor) -> str | None:
        tensors = {"lm_head.weight": values.contiguous()}
        save_file(tensors, tmp_path / "model.safetensors")
        return fingerprint(tmp_path).lm_head

    values = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
    changed = values.clone()
    changed[299, 3] += 1
    reshaped = values.reshape(600, 8)
    variants = [values, changed, reshaped, values.half(), values.bfloat16()]
    hashes = [hashed(variant) for variant in variants]
    assert None not in hashes and len({*hashes}) == len(variants)
    assert hashed(values) == hashes[0]
    assert hashed(values.to(torch.float8_e4m3fn)) is None
    # As a clone without git-lfs has it
    (tmp_path / "model.safetensors").write_text("version https://git-lfs")
    with pytest.raises(HeadsError, match="is not whole safetensors"):
        fingerprint(tmp_path)


def test_a_tokenizer_written_otherwise_is_the_same(tmp_path: Path) -> None:
    def hashed(**model: Any) -> str | None:
        added = [{"id": 2, "content": "<end>", "special": True}]
        content = {"model": model, "added_tokens": added}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return fingerprint(tmp_path).vocabulary

    ours = hashed(type="BPE", vocab={"a": 0, "b": 1})
    again = hashed(vocab={"b": 1, "a": 0}, fuse_unk=True)
    assert ours == again == hashed(vocab=[["a", -1.0], ["b", -2.0]])
    assert hashed(vocab={"a": 1, "b": 0}) != ours
    assert hashed(type="BPE") is None
