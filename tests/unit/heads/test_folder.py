# SPDX-License-Identifier: Apache-2.0
"""Heads folders that are not right: one line before a model loads, whoever reads them."""

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import heads_folders
import pytest
import torch
from conftest import ROOT, Factory
from refusals import (
    SERVE,
    Damage,
    Readers,
    config_text,
    edited,
    tensor,
    with_value,
)
from vllm import EngineArgs

from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.folder import check_folder, load_tensors, save_heads
from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.config.naming import is_ours

STORED = sorted(ROOT.glob("benchmarks/*/heads/*/config.json"))


@pytest.mark.parametrize("kind", heads_folders.KINDS)
def test_sound_heads_are_taken(
    readers: Readers, whole_heads: Factory, kind: str
) -> None:
    readers.assert_taken(whole_heads(kind))


@pytest.mark.parametrize(
    "config", STORED, ids=[str(path.parent.relative_to(ROOT)) for path in STORED]
)
def test_stored_heads_are_sound(config: Path) -> None:
    loaded, tensors = load_tensors(config.parent)
    assert loaded.kind == config.parent.name
    assert tensors.keys() == loaded.shapes().keys()


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def renamed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DAMAGES: list[tuple[str, Damage, str]] = [
    (
        "early",
        tensor("exit.4.transform", with_value(float("nan"))),
        "'exit.4.transform' has numbers that are not finite; train or copy",
    ),
    (
        "cp",
        tensor("cp.gate", torch.Tensor.long),
        "'cp.gate' is of int64, expected float32",
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
    ("cp", truncated, "is not whole safetensors"),
    ("cp", renamed, "has no model.safetensors; save the heads as safetensors"),
    (
        "dynamo",
        edited("layer_tensors", value={}),
        "layer_tensors={}: .* at least 1",
    ),
    (
        "dynamo",
        edited("sampling", "k", value=True),
        "k=True: .*correct it, or write",
    ),
    ("cp", config_text(b""), "config.json .* is not valid JSON .*; write"),
    (
        "cp",
        config_text(b"[]"),
        r"config.json .* holds \[\], not an object; write",
    ),
    (
        "cp",
        lambda folder: (folder / "config.json").unlink(),
        "has no config.json",
    ),
    (
        "cp",
        edited("speculators_model_type", value="c\n\x1b[1mp"),
        r"holds heads of kind 'c\\n\\x1b\[1mp'; expected",
    ),
    (
        "cp",
        edited("speculators_config", "proposal_methods", value=[]),
        "0.speculative_tokens is required",
    ),
]


@pytest.mark.parametrize(("kind", "damage", "message"), DAMAGES)
def test_damaged_heads_are_refused_by_all(
    readers: Readers,
    whole_heads: Factory,
    tmp_path: Path,
    kind: str,
    damage: Damage,
    message: str,
) -> None:
    folder = Path(shutil.copytree(whole_heads(kind), tmp_path / kind))
    damage(folder)
    readers.assert_refused(message, folder)


@pytest.mark.parametrize("folder", ["./nowhere", "", "/" + "a" * 500])
def test_names_that_are_no_folder(readers: Readers, folder: str) -> None:
    message = "does not exist|is empty|is neither a method"
    readers.assert_refused(message, folder, *readers.of.keys() - {SERVE})


def test_serving_heads_keeps_what_is_asked(whole_heads: Factory) -> None:
    folder = str(whole_heads("early"))
    asked = {"method": "paradecode"}
    args = EngineArgs(
        model=folder, dtype="float32", spec_tokens=1, speculative_config=asked
    )
    config = active_config(args.create_engine_config())
    assert config is not None
    assert (config.method, config.num_speculative_tokens) == ("early", 1)
    assert config.exit_layer == 4
    asked = {"method": "cp"}
    with pytest.raises(
        HeadsError, match="heads of kind 'early'; expected kind 'cp'"
    ):
        EngineArgs(model=folder, speculative_config=asked).create_engine_config()


def test_vllms_own_methods_are_left_to_it(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"method": "eagle3", "model": "nope"},
        {"method": "ngram"},
        {"model": "package.module.Proposer"},
        {"model": "s3://bucket/model"},
        {"model": str(tmp_path)},
        {},
    ]
    for content in (
        {"model_type": "llama"},
        {"speculators_model_type": "eagle3", "speculators_config": {}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        for config in asked:
            assert not is_ours(config), config


def test_written_files_follow_the_umask(
    tiny_model: Factory, tmp_path: Path
) -> None:
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
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "old"
