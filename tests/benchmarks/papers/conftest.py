# SPDX-License-Identifier: Apache-2.0
"""Contexts of `ppd bench tables` on a tiny model, with early heads, and with CP and DynaMo heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import overfitted
import pytest
import tiny
import torch
from conftest import patterned_texts, write_texts

from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.options import TablesOptions
from vllm_ppd.heads.dynamo.config import DynaMoConfig, JointSettings
from vllm_ppd.heads.io import load_tensors, save_heads

EXITS = (1, 2, 3)
TOP_K = 6  # of the joint of DynaMo's heads


@pytest.fixture(scope="session")
def options(
    tiny_model: Callable[..., Path], heads_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., TablesOptions]:
    """options(**changes): of tables of a tiny model with early heads."""
    folder = tmp_path_factory.mktemp("tables")
    data = write_texts(folder / "data.jsonl", patterned_texts(20, 30))
    small: dict[str, Any] = {
        "model": str(tiny_model()), "task": (f"patterns={data}",), "heads": (str(heads_folder(EXITS, 0.3)),),
        "out": str(folder / "t.json"), "prompts": 4, "prompt_tokens": 8, "new_tokens": 16, "rounds": 1,
        "kv_cache_gib": 0.05, "device": "cpu", "engine_dtype": "float32",
    }  # fmt: skip
    return lambda **changes: TablesOptions(**{**small, **changes})


@pytest.fixture(scope="session")
def early(options: Callable[..., TablesOptions]) -> Context:
    """With early heads."""
    return Context(options())


@pytest.fixture(scope="session")
def drafted(
    tiny_model: Callable[..., Path], options: Callable[..., TablesOptions], tmp_path_factory: pytest.TempPathFactory
) -> Context:
    """With CP heads of rank 1 (twice) and 2, and DynaMo heads of a short top-k."""
    folder = tmp_path_factory.mktemp("drafted")
    ids = torch.randint(0, tiny.VOCAB, (16, 48), generator=torch.Generator().manual_seed(0)).tolist()
    cp = {"positions": 3, "num_speculative_tokens": 2}
    heads = [
        overfitted.fit(tiny_model(), "cp", ids, folder / name, 4, rank=rank, condition=condition, **cp)
        for name, rank, condition in (("cp-a", 2, "chain"), ("cp-b", 1, "none"), ("cp-c", 1, "none"))
    ]
    dynamo = overfitted.fit(tiny_model(), "dynamo", ids, folder / "dynamo", 4, tokens=3, mask_entries=4000)
    config, tensors = load_tensors(str(dynamo))
    assert isinstance(config, DynaMoConfig)
    save_heads(dynamo, config.model_copy(update={"sampling": JointSettings(k=TOP_K)}), tensors)
    return Context(options(heads=tuple(map(str, [*heads, dynamo])), prompts=6, new_tokens=20))
