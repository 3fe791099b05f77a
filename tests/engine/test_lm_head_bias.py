# SPDX-License-Identifier: Apache-2.0
"""LM heads with a bias (Phi-2, GPT-J): their rows are read exactly, and whole CP heads
draft with their bias.
"""

from pathlib import Path

import heads_folders
import pytest
import tiny
import torch
from cases import generate, greedy
from conftest import Factory, drafter_of, start_engine
from safetensors.torch import load_file

from vllm_ppd.heads.folder import save_heads

pytestmark = pytest.mark.engine
SIZES = {"hidden_size": 128, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def phi(made_once: Factory) -> Path:
    return made_once("phi-with-bias", tiny.make_biased)


def stored(model: Path, name: str) -> torch.Tensor:
    """The weight [vocabulary, hidden] or bias [vocabulary] of a checkpoint's LM head."""
    return load_file(model / "model.safetensors")[f"lm_head.{name}"]


@pytest.mark.parametrize("size", [None, 100])
def test_whole_heads_draft_with_the_bias(
    phi: Path,
    tmp_path: Path,
    size: int | None,
) -> None:
    """As they are trained: whole classifiers that are zero draft the token of the largest bias."""
    config = heads_folders.config_of(
        "cp",
        phi,
        SIZES,
        factorized=False,
        rank=1,
        condition="none",
    )
    tensors = heads_folders.blank_tensors(config)
    tensors["token_counts"] = torch.arange(tiny.VOCAB, dtype=torch.int32)
    save_heads(tmp_path, config, tensors)
    options = {
        "method": "cp",
        "model": str(tmp_path),
        "draft_vocab_size": size,
    }
    llm = start_engine(phi, options, dtype="bfloat16")
    speculator = drafter_of(llm)
    bias = stored(phi, "bias")
    for token_ids in (torch.arange(tiny.VOCAB), None):
        rows, read = speculator.target.lm_head.rows(token_ids)
        assert torch.equal(rows[: tiny.VOCAB], stored(phi, "weight"))
        assert torch.equal(read[: tiny.VOCAB], bias)
    generate(llm, [{"prompt_token_ids": [5, 6, 7]}], greedy(8))
    bias[: tiny.VOCAB - (size or tiny.VOCAB)] = -torch.inf  # the rarest tokens
    assert (speculator.draft_tokens[0] == bias.argmax()).all()
