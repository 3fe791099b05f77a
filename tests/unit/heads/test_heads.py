# SPDX-License-Identifier: Apache-2.0
"""Early heads, their folder, and what is refused about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from vllm_ppd.heads.base import TargetFingerprint
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.io import check_folder, kind_of, load_config, load_tensors
from vllm_ppd.heads.target import check_target, fingerprint


def test_fresh_heads_are_the_untrained_exit() -> None:
    hidden = torch.randn(4, 16)
    assert torch.equal(EarlyHeads([2, 5], 16)(hidden, 5), hidden)


def test_head_is_lm_head_times_transform() -> None:
    """softmax(E* T h) is what a full head E^(i) = E* T^(i) computes (ParaDecode, section 2.1)."""
    torch.manual_seed(0)
    lm_head, hidden, heads = torch.randn(50, 16), torch.randn(4, 16), EarlyHeads([3], 16)
    transform = torch.randn(16, 16)
    heads.weights["3"].data.copy_(transform)
    torch.testing.assert_close(heads(hidden, 3) @ lm_head.T, hidden @ (lm_head @ transform).T)


def test_round_trip(heads_folder: Callable[..., Path]) -> None:
    folder = heads_folder(exit_layers=(2, 4), noise=0.1)
    config, tensors = load_tensors(folder, EarlyConfig)
    heads = EarlyHeads.from_tensors(config, tensors)
    assert kind_of(folder) == "early"
    assert (config.exit_layers, config.num_speculative_tokens) == ([2, 4], 2)
    assert torch.equal(heads.weights["4"], load_file(folder / "model.safetensors")["exit.4.transform"])
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_config_is_in_speculators_format(heads_folder: Callable[..., Path], tiny_model: Callable[..., Path]) -> None:
    from vllm.transformers_utils.config import maybe_override_with_speculators

    from vllm_ppd.vllm_plugins import register

    register()
    folder = heads_folder()
    model, tokenizer, speculative = maybe_override_with_speculators(str(folder), None, trust_remote_code=False)
    assert model == tokenizer == str(tiny_model())
    assert speculative == {"method": "early", "num_speculative_tokens": 2, "model": str(folder)}


def target(folder: Path, **changes: object) -> None:
    config = load_config(folder)
    facts: dict = {"hidden_size": 64, "vocab_size": tiny.VOCAB, "num_hidden_layers": tiny.LAYERS}
    check_target(config, folder, **{**facts, "fingerprint": config.fingerprint, **changes})


def test_matching_target_is_accepted(heads_folder: Callable[..., Path], tiny_model: Callable[..., Path]) -> None:
    folder = heads_folder()
    target(folder)
    target(folder, fingerprint=fingerprint(tiny_model()))
    target(folder, fingerprint=TargetFingerprint())  # a target that is not on this disk yet


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "hidden_size is 64 there and 128 in this model"),
        ({"vocab_size": 32_000}, "vocab_size is 320 there and 32000"),
        ({"num_hidden_layers": 8}, "num_hidden_layers is 6 there and 8"),
        ({"fingerprint": TargetFingerprint(tokenizer="0" * 64)}, "the hash of its tokenizer differs"),
        ({"fingerprint": TargetFingerprint(lm_head="0" * 64)}, "the hash of its lm_head differs"),
    ],
)
def test_other_target_is_refused(heads_folder: Callable[..., Path], changes: dict, message: str) -> None:
    with pytest.raises(HeadsError, match=message):
        target(heads_folder(), **changes)


def test_fingerprint_tells_models_apart(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    other = tiny.make_model(tmp_path / "other", seed=1)
    ours, theirs = fingerprint(tiny_model()), fingerprint(other)
    assert ours.lm_head
    assert ours.lm_head != theirs.lm_head
    assert ours.tokenizer == theirs.tokenizer
    assert fingerprint(tmp_path) == TargetFingerprint()


def damage_truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def damage_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x80\x04 not safetensors")


def damage_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def damage_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damage_shape(folder: Path) -> None:
    save_file({"exit.3.transform": torch.zeros(64, 32)}, folder / "model.safetensors")


def damage_name(folder: Path) -> None:
    save_file({"exit.9.transform": torch.zeros(64, 64)}, folder / "model.safetensors")


def damage_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def damage_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def damage_kind(folder: Path) -> None:
    edit(folder, speculators_model_type="eagle3")


def damage_field(folder: Path) -> None:
    edit(folder, exit_layers=[])


def damage_layout(folder: Path) -> None:
    edit(folder, speculators_config={"proposal_methods": "x", "verifier": []})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, "truncated or not safetensors"),
        (damage_header, "truncated or not safetensors"),
        (damage_pickle, "'pytorch_model.bin', a pickle, which is never loaded"),
        (damage_missing, "has no model.safetensors"),
        (damage_shape, r"'exit.3.transform' has shape \[64, 32\], expected \[64, 64\]"),
        (damage_name, "no tensor 'exit.3.transform'"),
        (damage_json, "is not valid JSON"),
        (damage_no_config, "has no config.json"),
        (damage_kind, "heads of kind 'eagle3'; expected kind 'cp', 'dynamo', 'early'"),
        (damage_field, "exit_layers: List should have at least 1 item"),
        (damage_layout, "speculators_config.verifier.name_or_path: Field required"),
    ],
)
def test_damage_is_named(
    heads_folder: Callable[..., Path], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = Path(shutil.copytree(heads_folder(), tmp_path / "heads"))
    damage(folder)
    with pytest.raises(HeadsError, match=message) as caught:
        check_folder(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_missing_folder() -> None:
    with pytest.raises(HeadsError, match="'/nowhere/heads' does not exist"):
        load_config("/nowhere/heads")
