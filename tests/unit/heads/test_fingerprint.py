# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of targets: equal values in another dtype are the same LM head; what is rounded is told as such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_ppd.heads.fingerprint import TargetFingerprint, fingerprint
from vllm_ppd.heads.io import load_config

DEMO = Path(__file__).resolve().parents[3] / "benchmarks" / "demo"
SAME_DTYPE = "the dtype of its lm_head differs"


def target(folder: Path, values: torch.Tensor) -> TargetFingerprint:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"lm_head.weight": values.contiguous()}, folder / "model.safetensors")
    return fingerprint(folder)


def recorded(made: TargetFingerprint, old: bool) -> TargetFingerprint:
    """As a heads' config.json holds it; an old one has no lm_head_bfloat16."""
    fields = made.model_dump()
    assert set(fields) == {"tokenizer", "lm_head", "lm_head_bfloat16"}
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


@pytest.mark.parametrize("kind", ["early", "cp", "dynamo"])
def test_fingerprints_of_earlier_heads_hold(kind: str) -> None:
    config = load_config(DEMO / "heads" / kind)
    assert config.fingerprint.lm_head
    assert config.fingerprint.difference(fingerprint(DEMO / "model")) is None
