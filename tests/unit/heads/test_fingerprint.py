# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of targets: equal values in another dtype are the same LM head; what is rounded is told as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_ppd.heads.base import TargetFingerprint
from vllm_ppd.heads.io import load_config
from vllm_ppd.heads.target import fingerprint

DEMO = Path(__file__).resolve().parents[3] / "benchmarks" / "demo"
SAME_DTYPE = "the dtype of its lm_head differs"


def target(folder: Path, values: torch.Tensor) -> TargetFingerprint:
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
def test_a_float32_copy_is_the_same_target(tmp_path: Path, dtype: torch.dtype, old: bool) -> None:
    values = torch.randn(300, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    narrow, wide = target(tmp_path / "narrow", values), target(tmp_path / "wide", values.float())
    assert narrow.lm_head != wide.lm_head
    assert recorded(narrow, old).difference(wide) is None
    assert recorded(wide, old).difference(narrow) is None


@pytest.mark.parametrize("old", [False, True])
def test_a_rounded_copy_is_told_by_its_dtype(tmp_path: Path, old: bool) -> None:
    values = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
    wide, narrow = target(tmp_path / "wide", values), target(tmp_path / "narrow", values.bfloat16())
    assert SAME_DTYPE in str(recorded(narrow, old).difference(wide))
    # What was rounded cannot be told from a hash of the whole values alone.
    expected = "the hash of its lm_head differs" if old else SAME_DTYPE
    assert expected in str(recorded(wide, old).difference(narrow))


def test_other_values_are_another_target(tmp_path: Path) -> None:
    values = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
    ours = recorded(target(tmp_path / "ours", values), False)
    changed = values.clone()
    changed[299, 3] += 1
    for other in (changed, values.reshape(600, 8), values.T.bfloat16()):
        assert ours.difference(target(tmp_path / "other", other)) == "the hash of its lm_head differs"
    assert ours.difference(TargetFingerprint()) is None


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


@pytest.mark.parametrize("kind", ["early", "cp", "dynamo"])
def test_fingerprints_of_earlier_heads_hold(kind: str) -> None:
    config = load_config(DEMO / "heads" / kind)
    assert config.fingerprint.lm_head
    assert config.fingerprint.difference(fingerprint(DEMO / "model")) is None
