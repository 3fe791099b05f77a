# SPDX-License-Identifier: Apache-2.0
"""The target that heads name: where it is looked for, how another is named, and by what it is told from others."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import heads_folders
import pytest
import tiny
import torch
from conftest import ROOT, Factory, our_log
from refusals import edited
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import EngineArgs

from vllm_ppd.heads.base import TargetFingerprint
from vllm_ppd.heads.calibration.options import CalibrationOptions
from vllm_ppd.heads.calibration.run import checked
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.io import check_folder, load_calibration, load_config
from vllm_ppd.heads.target import check_layers, check_target, decoder_layer, find_target, fingerprint, stored_name
from vllm_ppd.vllm_plugins.cli.main import main
from vllm_ppd.vllm_plugins.config.activation import active_config

DEMO = ROOT / "benchmarks" / "demo"
SAME_DTYPE = "the dtype of its lm_head differs"
VALUES = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))


def test_targets_travel_with_a_checkout(
    tiny_model: Factory, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is looked for from the heads' folder upwards, from wherever it is asked."""
    checkout = tmp_path / "checkout"
    model = Path(shutil.copytree(tiny_model(), checkout / "models" / "tiny"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(checkout)
    assert stored_name("models/tiny", "heads/cp") == "models/tiny"
    assert stored_name("models/tiny", tmp_path / "elsewhere") == str(model)
    assert stored_name("org/name", "heads/cp") == "org/name"
    folder = heads_folders.make_heads(checkout / "heads" / "cp", "cp", Path("models/tiny"))
    assert find_target("models/tiny", folder) == "models/tiny"
    moved = tmp_path / "moved"
    checkout.rename(moved)
    folder = moved / "heads" / "cp"
    assert load_config(folder).verifier == "models/tiny"
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = str(moved / "models" / "tiny")
    assert main(["inspect", str(folder)]) == 0
    assert f"will load: yes, with {path}" in capsys.readouterr().out
    assert checked(CalibrationOptions(heads=str(folder), data=("-",)))[2] == path
    config = EngineArgs(model=str(folder), dtype="float32", kv_cache_memory_bytes=1 << 24).create_engine_config()
    assert config.model_config.model == config.model_config.tokenizer == path
    active = active_config(config)
    assert active is not None and active.model == str(folder)


def test_a_target_that_is_nowhere(tiny_model: Factory, tmp_path: Path, capsys: Any) -> None:
    """It is said which was looked for, and how to name another; naming another works."""
    folder = heads_folders.make_heads(tmp_path / "heads", "cp", tiny_model())
    edited("speculators_config", "verifier", "name_or_path", value="some/old/path")(folder)
    with pytest.raises(HeadsError, match=r"target 'some/old/path' of the heads in .*; give its folder with --target"):
        checked(CalibrationOptions(heads=str(folder), data=("-",)))
    with pytest.raises(HeadsError, match=r"'some/old/path'.*; name it: vllm serve TARGET --speculative-model HEADS"):
        EngineArgs(model=str(folder)).create_engine_config()
    assert main(["inspect", str(folder)]) == 0
    assert (
        "not compared with its target 'some/old/path', which is not on this disk (give --target DIR)"
        in capsys.readouterr().out
    )
    assert main(["inspect", str(folder), "--target", str(tiny_model())]) == 0
    assert f"will load: yes, with {tiny_model()}" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--target", str(tiny_model("qwen2"))]) == 2
    assert checked(CalibrationOptions(heads=str(folder), data=("-",), model=str(tiny_model())))[2] == str(tiny_model())


@pytest.mark.parametrize("kind", heads_folders.OF_DEMO)
def test_the_demo_heads_are_sound_from_anywhere(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their fingerprints, which earlier versions took, hold."""
    monkeypatch.chdir(tmp_path)
    config = check_folder(DEMO / "heads" / kind)
    assert find_target(config.verifier, DEMO / "heads" / kind) == str(DEMO / "model")
    load_calibration(DEMO / "heads" / kind)
    target = fingerprint(DEMO / "model")
    assert config.fingerprint.lm_head and target.lm_head
    assert config.fingerprint.difference(target) is None
    assert config.fingerprint.other_weights(target) is None


def compare(folder: Path, **changes: object) -> str | None:
    config = load_config(folder)
    facts: dict = {"hidden_size": 64, "vocab_size": tiny.VOCAB, "num_hidden_layers": tiny.LAYERS}
    return check_target(config, folder, **{**facts, "fingerprint": config.fingerprint, **changes})


def test_matching_target_is_accepted(heads_folder: Factory, tiny_model: Factory) -> None:
    folder = heads_folder()
    assert compare(folder) is None
    assert compare(folder, fingerprint=fingerprint(tiny_model())) is None
    assert compare(folder, fingerprint=TargetFingerprint()) is None  # a target that is not on this disk yet


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "hidden_size is 64 there, but 128 in this model"),
        ({"vocab_size": 32_000}, "vocab_size is 320 there, but 32000"),
        ({"num_hidden_layers": 8}, "num_hidden_layers is 6 there, but 8"),
        ({"fingerprint": TargetFingerprint(tokenizer="0" * 64)}, "the hash of its tokenizer differs"),
        ({"fingerprint": TargetFingerprint(lm_head="0" * 64), "strict": True}, "its lm_head has other values"),
    ],
)
def test_other_target_is_refused(heads_folder: Factory, changes: dict, message: str) -> None:
    with pytest.raises(HeadsError, match=message):
        compare(heads_folder(), **changes)


def copied(model: Path, folder: Path, dtype: torch.dtype, noise: float = 0.0) -> Path:
    """A copy of a model folder with its weights in a dtype, and with noise as a fine-tune may have."""
    shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    torch.manual_seed(0)
    changed = {name: (tensor + noise * torch.randn_like(tensor)).to(dtype) for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("dtype", "noise", "how"), [
    (torch.float16, 0.0, r"other values \(a fine-tune or another dtype\), sampled rows differ by \S+e-\d+ %"),
    (torch.bfloat16, 0.01, r"other values .*, sampled rows differ by \d\S* %"),
    (torch.bfloat16, 0.0, None),
])  # fmt: skip
def test_copies_and_fine_tunes_are_warned_about(
    tiny_model: Factory, tmp_path: Path, capsys: Any, dtype: torch.dtype, noise: float, how: str | None
) -> None:
    """Most values of a bfloat16 model are exact in float16, all but the smallest ones."""
    ours = copied(tiny_model(), tmp_path / "bfloat16", torch.bfloat16)
    tensors = load_file(ours / "model.safetensors")
    tensors["lm_head.weight"][0, :8] = 1e-6
    save_file(tensors, ours / "model.safetensors", {"format": "pt"})
    other = copied(ours, tmp_path / "other", dtype, noise)
    heads = str(heads_folders.make_heads(tmp_path / "heads", "cp", ours))
    args = EngineArgs(model=str(other), speculative_config={"model": heads}, kv_cache_memory_bytes=1 << 24)
    options = CalibrationOptions(heads=heads, data=("-",), model=str(other))
    with our_log() as said:
        args.create_engine_config()
    assert main(["inspect", heads, "--target", str(other)]) == 0
    shown = capsys.readouterr().out
    if how is None:
        assert not said
        assert checked(options)[2] == str(other)
        return
    (line,) = said
    assert re.search(f"were trained for another target .*: its lm_head has {how}. Drafts are verified", line)
    assert "will load: yes" in shown and "Drafts are verified" in shown
    with pytest.raises(HeadsError, match=r"its lm_head has other values .*; use the heads of this model"):
        checked(options)  # measurements belong to the target that the heads name


def test_unverified_heads_of_other_weights_are_refused(tiny_model: Factory, tmp_path: Path) -> None:
    heads = str(heads_folders.make_heads(tmp_path / "heads", "dynamo", tiny_model()))
    other = copied(tiny_model(), tmp_path / "other", torch.float32, 0.01)
    with pytest.raises(HeadsError, match="its lm_head has other values"):
        EngineArgs(model=str(other), speculative_config={"model": heads, "verify": False}).create_engine_config()


def test_layers_of_the_target(tiny_model: Factory, tmp_path: Path) -> None:
    """The names and shapes are what heads were trained with, of every family; another family's layers are refused."""
    families = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3", "phi3", "gpt_neox")
    configs = {family: AutoConfig.from_pretrained(tiny_model(family)) for family in families}
    for family, config in configs.items():
        layers = AutoModelForCausalLM.from_pretrained(tiny_model(family)).base_model.layers
        assert decoder_layer(config) == {name: list(t.shape) for name, t in layers[-1].state_dict().items()}
    heads = heads_folders.config_of("dynamo", tiny_model())
    check_layers(heads, tmp_path, configs["llama"])
    with pytest.raises(HeadsError, match=r"layer_tensors does not have 'self_attn\.k_norm\.weight'"):
        check_layers(heads, tmp_path, configs["qwen3"])
    with pytest.raises(HeadsError, match=r"'input_layernorm.weight' has shape \[64\], but \[128\] in the target"):
        check_layers(heads, tmp_path, type(configs["llama"])(**configs["llama"].to_dict() | {"hidden_size": 128}))


def hashed(folder: Path, values: torch.Tensor) -> TargetFingerprint:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"lm_head.weight": values.contiguous()}, folder / "model.safetensors")
    return fingerprint(folder)


def recorded(made: TargetFingerprint, old: bool) -> TargetFingerprint:
    """As a heads' config.json holds it; an old one has no lm_head_bfloat16."""
    fields = made.model_dump()
    assert set(fields) == {"tokenizer", "vocabulary", "lm_head", "lm_head_bfloat16"}
    return TargetFingerprint(**fields | ({"lm_head_bfloat16": None} if old else {}))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_copy_is_the_same_hashed(tmp_path: Path, dtype: torch.dtype, old: bool) -> None:
    values = VALUES.to(dtype)
    narrow, wide = hashed(tmp_path / "narrow", values), hashed(tmp_path / "wide", values.float())
    assert narrow.lm_head != wide.lm_head
    assert recorded(narrow, old).other_weights(wide) is None
    assert recorded(wide, old).other_weights(narrow) is None


@pytest.mark.parametrize("old", [False, True])
def test_a_rounded_copy_is_told_by_its_dtype(tmp_path: Path, old: bool) -> None:
    wide, narrow = hashed(tmp_path / "wide", VALUES), hashed(tmp_path / "narrow", VALUES.bfloat16())
    assert SAME_DTYPE in str(recorded(narrow, old).other_weights(wide))
    # What was rounded cannot be told from a hash of the whole values alone.
    expected = "its lm_head has other values" if old else SAME_DTYPE
    assert expected in str(recorded(wide, old).other_weights(narrow))


def test_other_values_are_another_hashed(tmp_path: Path) -> None:
    ours = recorded(hashed(tmp_path / "ours", VALUES), False)
    changed = VALUES.clone()
    changed[299, 3] += 1
    for other in (changed, VALUES.reshape(600, 8), VALUES.T.bfloat16()):
        assert "other values" in str(ours.other_weights(hashed(tmp_path / "other", other)))
    assert ours.other_weights(TargetFingerprint()) is None


def test_a_tokenizer_written_otherwise_is_the_same(tmp_path: Path) -> None:
    """Its vocabulary counts, where both sides know it; older heads know the file alone."""

    def made(name: str, **content: Any) -> TargetFingerprint:
        (folder := tmp_path / name).mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(content))
        return fingerprint(folder)

    added = [{"id": 2, "content": "<end>", "special": True}]
    ours = made("ours", model={"type": "BPE", "vocab": {"a": 0, "b": 1}}, added_tokens=added)
    again = made("again", model={"vocab": {"b": 1, "a": 0}, "fuse_unk": True}, added_tokens=added, decoder=None)
    listed = made("listed", model={"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}, added_tokens=added)
    assert ours.tokenizer != again.tokenizer
    assert ours.difference(again) is None and ours.difference(listed) is None
    other = made("other", model={"vocab": {"a": 1, "b": 0}}, added_tokens=added)
    assert ours.difference(other) == "the hash of its vocabulary differs"
    old = ours.model_copy(update={"vocabulary": None})
    assert old.difference(again) == old.difference(other) == "the hash of its tokenizer differs"
    strange = made("strange", model={"type": "BPE"})
    assert (strange.vocabulary, ours.difference(strange)) == (None, "the hash of its tokenizer differs")
