# SPDX-License-Identifier: Apache-2.0
"""Heads folders that are not right: one line before a model loads, whoever reads them."""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads_folders
import pytest
import torch
from conftest import ROOT, Factory
from refusals import SERVE, Damage, Readers, config_text, edited, tensor, with_value
from vllm import EngineArgs
from vllm.transformers_utils.config import maybe_override_with_speculators

from vllm_ppd.heads.files import write_tensors, write_text
from vllm_ppd.heads.io import check_folder, load_tensors, save_heads
from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.config.naming import is_ours
from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.patches import vllm_version

STORED = sorted(ROOT.glob("benchmarks/*/heads/*/config.json"))


@pytest.fixture
def refused_by_all(readers: Readers, whole_heads: Factory, tmp_path: Path) -> Factory:
    """refused_by_all(kind, damage, message): a folder of a kind, damaged."""

    def check(kind: str, damage: Damage, message: str) -> None:
        folder = Path(shutil.copytree(whole_heads(kind), tmp_path / kind))
        damage(folder)
        for name in readers.of:
            line = readers.refusal(name, str(folder))
            assert line is not None, f"{name} takes it"
            assert re.search(message, line), f"{name}: {line}"

    return check


@pytest.mark.parametrize("kind", heads_folders.KINDS)
def test_sound_heads_are_taken(
    readers: Readers, whole_heads: Factory, kind: str
) -> None:
    for name in readers.of:
        assert readers.refusal(name, str(whole_heads(kind))) is None, name


@pytest.mark.parametrize(
    "config", STORED, ids=[str(path.parent.relative_to(ROOT)) for path in STORED]
)
def test_stored_heads_are_sound(config: Path) -> None:
    loaded, tensors = load_tensors(config.parent)
    assert loaded.kind == config.parent.name
    assert tensors.keys() == loaded.shapes().keys()


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("early", "exit.4.transform", float("nan")),
        ("cp", "cp.gate", float("inf")),
        ("dynamo", "head.3.mlp.up_proj.weight", -float("inf")),
    ],
)
def test_weights_that_are_not_finite(
    refused_by_all: Factory, kind: str, name: str, value: float
) -> None:
    message = f"tensor '{name}' has numbers that are not finite; train or copy the heads again"
    refused_by_all(kind, tensor(name, with_value(value)), message)


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        (
            "cp",
            tensor("cp.gate", torch.Tensor.long),
            "'cp.gate' is of int64, expected float32",
        ),
        (
            "cp",
            tensor("cp.gate", torch.Tensor.bfloat16),
            "'cp.gate' is of bfloat16, expected",
        ),
        (
            "cp",
            tensor("cp.gate", lambda gate: gate[:, :32]),
            r"shape \[2, 32\], expected \[2, 64\]",
        ),
        (
            "cp",
            tensor("token_counts", torch.Tensor.float),
            "is of float32, expected int32 or int64",
        ),
        (
            "cp",
            tensor("token_counts", with_value(-1)),
            "counts in tensor 'token_counts' are negative",
        ),
        (
            "dynamo",
            tensor("cooccurrence.2.keys", lambda t: t.flip(0)),
            "are not ascending keys",
        ),
        (
            "dynamo",
            tensor("cooccurrence.2.counts", with_value(1 << 30, 0)),
            "their sum is more than",
        ),
        (
            "dynamo",
            edited("layer_tensors", value={}),
            "layer_tensors: .* at least 1 item",
        ),
        (
            "dynamo",
            edited("sampling", "k", value=True),
            "k: .*correct it, or write the heads again",
        ),
        ("early", edited("exit_layers", value=[2, 4, 6]), "exit_layers"),
        ("cp", edited("rank", value=2.0), "rank: .*correct it"),
        ("cp", edited("rank", value=10**9), "rank"),
    ],
)
def test_tensors_and_settings(
    refused_by_all: Factory, kind: str, damage: Damage, message: str
) -> None:
    refused_by_all(kind, damage, message)


def damaged_weights(change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged_weights(lambda data: data[:-100]), "is not whole safetensors"),
        (
            damaged_weights(lambda data: b"\x80\x04 a pickle"),
            "is not whole safetensors",
        ),
        (damaged_weights(lambda data: b""), "is not whole safetensors"),
        (pickled, "has no model.safetensors; save the heads as safetensors"),
    ],
)
def test_weights_that_cannot_be_read(
    refused_by_all: Factory, damage: Damage, message: str
) -> None:
    refused_by_all("cp", damage, message)


METHODS = ("speculators_config", "proposal_methods")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (config_text(b""), "config.json .* is not valid JSON .*; write"),
        (config_text(b"[]"), r"config.json .* holds \[\], not an object; write"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (
            edited("speculators_model_type", value=["cp"]),
            r"holds heads of kind \['cp'\]; expected",
        ),
        (
            edited("speculators_model_type", value="c\n\x1b[1mp"),
            r"holds heads of kind 'c\\n\\x1b\[1mp'",
        ),
        (
            edited(*METHODS, value=[]),
            "proposal_methods.0.speculative_tokens: Field required",
        ),
        (
            edited("speculators_config", "verifier", value=[]),
            "verifier.name_or_path: Field required",
        ),
        (
            edited("transformer_layer_config", value=None),
            "transformer_layer_config: Input should be",
        ),
    ],
)
def test_config_of_another_shape(
    refused_by_all: Factory, damage: Damage, message: str
) -> None:
    refused_by_all("cp", damage, message)


@pytest.mark.parametrize("folder", ["./nowhere", "", "/" + "a" * 500])
def test_names_that_are_no_folder(readers: Readers, folder: str) -> None:
    for name in readers.of.keys() - {SERVE}:
        line = readers.refusal(name, folder)
        assert line is not None, f"{name} takes it"
        assert re.search("does not exist|is empty|is neither a method", line), (
            f"{name}: {line}"
        )


def test_config_is_in_speculators_format(
    heads_folder: Factory, tiny_model: Factory
) -> None:
    if not vllm_version().startswith("0.32"):
        pytest.skip("vLLM 0.33 reads targets on the Hub alone from such a config")
    folder = heads_folder()
    model, tokenizer, speculative = maybe_override_with_speculators(
        str(folder), None, trust_remote_code=False
    )
    assert model == tokenizer == str(tiny_model())
    assert speculative == {
        "method": "early",
        "num_speculative_tokens": 2,
        "model": str(folder),
    }


def test_serving_heads_keeps_what_is_asked(whole_heads: Factory) -> None:
    folder = str(whole_heads("early"))
    args = EngineArgs(
        model=folder,
        dtype="float32",
        spec_tokens=1,
        speculative_config={"method": "paradecode"},
    )
    config = active_config(args.create_engine_config())
    assert config is not None
    assert (config.method, config.num_speculative_tokens, config.exit_layer) == (
        "paradecode",
        1,
        4,
    )
    asked = {"method": "cp"}
    with pytest.raises(OptionError, match="method='cp' does not support early heads"):
        EngineArgs(model=folder, speculative_config=asked).create_engine_config()


def test_vllms_own_methods_are_left_to_it(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"method": "eagle3", "model": "nope"},
        {"method": "ngram"},
        {"model": "package.module.Proposer"},
        {"model": "s3://bucket/model"},
        {},
    ]
    for config in asked:
        assert not is_ours(config), config
    for content in (
        {"model_type": "llama"},
        {"speculators_model_type": "eagle3", "speculators_config": {}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert not is_ours({"model": str(tmp_path)})


def test_written_files_follow_the_umask(tiny_model: Factory, tmp_path: Path) -> None:
    """safetensors alone would let only the owner read them."""
    before = os.umask(0o022)
    try:
        config = heads_folders.config_of("cp", tiny_model())
        save_heads(tmp_path, config, heads_folders.blank_tensors(config))
    finally:
        os.umask(before)
    for name in ("config.json", "model.safetensors"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o644
    assert check_folder(tmp_path) == config


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    write_text(tmp_path / "config.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "config.json", "\ud800")
    write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(2)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.safetensors",
        "config.json",
    ]
    assert (tmp_path / "config.json").read_text() == "old"
