# SPDX-License-Identifier: Apache-2.0
"""LM heads with a bias (Phi-2, GPT-J): their rows are read exactly, and whole CP heads
draft with their bias.
"""

from pathlib import Path
from typing import Any

import heads_folders
import pytest
import tiny
import torch
import transformers as tf
from cases import generate, greedy
from conftest import Factory, drafter_of, start_engine
from safetensors.torch import load_file

from vllm_ppd.heads.draft_vocabulary import most_frequent
from vllm_ppd.heads.io import save_heads

pytestmark = pytest.mark.engine
SIZES = {"hidden_size": 128, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def phi(made_once: Factory) -> Path:
    """A tiny Phi in bfloat16 whose LM head has a bias of about the size of its logits."""

    def make(folder: Path) -> None:
        torch.manual_seed(0)
        config = tf.PhiConfig(
            vocab_size=tiny.VOCAB,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            bos_token_id=0,
            eos_token_id=0,
            **SIZES,
        )
        model = tf.PhiForCausalLM(config)
        model.lm_head.bias.data.normal_()
        model.bfloat16().save_pretrained(folder)
        tiny.make_tokenizer().save_pretrained(folder)

    return made_once("phi-with-bias", make)


def stored(model: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight [vocabulary, hidden] and bias [vocabulary] of a checkpoint's LM head."""
    tensors = load_file(model / "model.safetensors")
    return tensors["lm_head.weight"], tensors["lm_head.bias"]


def test_rows_are_those_of_the_weight(phi: Path, tmp_path: Path) -> None:
    heads = heads_folders.make_heads(tmp_path / "heads", "cp", phi, SIZES)
    options = {
        "method": "cp",
        "model": str(heads),
        "num_speculative_tokens": 2,
        "draft_vocab_size": 100,
    }
    llm = start_engine(phi, options, dtype="bfloat16")
    weight, stored_bias = stored(phi)
    target = drafter_of(llm).target
    rows, bias = target.lm_head.rows(torch.arange(tiny.VOCAB))
    assert torch.equal(rows, weight)
    assert torch.equal(bias, stored_bias)
    shard, bias_of_shard = target.lm_head.rows()
    assert torch.equal(shard[: tiny.VOCAB], weight)
    assert torch.equal(bias_of_shard[: tiny.VOCAB], stored_bias)


@pytest.mark.parametrize("size", [None, 100])
def test_whole_heads_draft_with_the_bias(
    phi: Path, tmp_path: Path, size: int | None
) -> None:
    """As they are trained: whole classifiers that are zero draft the token of the largest bias."""
    changes: dict[str, Any] = {"factorised": False, "rank": 1, "condition": "none"}
    config = heads_folders.config_of("cp", phi, SIZES, **changes)
    tensors = heads_folders.blank_tensors(config)
    tensors["token_counts"] = torch.arange(tiny.VOCAB, dtype=torch.int32)
    save_heads(tmp_path / "heads", config, tensors)
    options: dict[str, Any] = {
        "method": "cp",
        "model": str(tmp_path / "heads"),
        "draft_vocab_size": size,
    }
    llm = start_engine(phi, options, dtype="bfloat16")
    drafter = drafter_of(llm).drafter
    drafted = []
    stock = drafter.propose

    def propose(*args: Any) -> Any:
        drafts = stock(*args)
        drafted.append(drafts.token_ids)
        return drafts

    drafter.propose = propose
    generate(llm, [{"prompt_token_ids": [5, 6, 7]}], greedy(8))
    _, bias = stored(phi)
    likeliest = int(bias.argmax())
    if size is not None:
        tokens = most_frequent(tensors["token_counts"], size)
        likeliest = int(tokens[bias[tokens].argmax()])
    assert drafted and all((ids == likeliest).all() for ids in drafted)
