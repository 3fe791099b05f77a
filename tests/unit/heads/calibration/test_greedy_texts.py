# SPDX-License-Identifier: Apache-2.0
"""Calibration's texts are the target's own: greedy is the argmax, whatever generation_config.json says."""

from typing import Any

import pytest
import tiny
import torch
from conftest import Factory
from transformers import GenerationConfig

from vllm_ppd.heads.calibration.text import end_tokens, generate
from vllm_ppd.heads.training.target import Target

TOKENS = 24
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.5},
    "ngrams": {"no_repeat_ngram_size": 1},
    "beams": {"num_beams": 3},
    "bad words": {"bad_words_ids": [[token] for token in range(1, 160)]},
    "suppressed": {"suppress_tokens": list(range(1, 160)), "begin_suppress_tokens": list(range(160, 300))},
    "forced": {"forced_eos_token_id": 7},
    "length": {"max_length": 20, "max_new_tokens": 3, "min_new_tokens": 20},
    "sampling": {"do_sample": True, "temperature": 3.0, "top_k": 5, "min_p": 0.1, "typical_p": 0.5},
    "assisted": {"prompt_lookup_num_tokens": 3},
}


@pytest.fixture(scope="module")
def target(tiny_model: Factory) -> Target:
    return Target(str(tiny_model()), torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    return torch.randint(1, tiny.VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def argmax(target: Target, prompts: torch.Tensor, ends: list[int]) -> list[list[int]]:
    """Each text's tokens up to its end."""
    texts = []
    for row in prompts:
        ids = row.tolist()
        while len(ids) < len(row) + TOKENS and not (len(ids) > len(row) and ids[-1] in ends):
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        texts.append(ids[len(row) :])
    return texts


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_is_greedy(target: Target, prompts: torch.Tensor, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given = GenerationConfig(eos_token_id=0, **SETTINGS[name])
    monkeypatch.setattr(target.model, "generation_config", given)
    texts = generate(target, prompts, TOKENS)
    said = [row[:length] for row, length in zip(texts.generated.tolist(), texts.lengths.tolist(), strict=True)]
    assert said == argmax(target, prompts, [0])
    assert target.model.generation_config is given, "what a trained base model is saved with"


def test_sampled_texts_are_of_the_whole_distribution(
    target: Target, prompts: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = generate(target, prompts, TOKENS, 0.8)
    monkeypatch.setattr(target.model, "generation_config", GenerationConfig(eos_token_id=0, min_p=0.9, top_h=0.1))
    torch.manual_seed(0)
    assert torch.equal(generate(target, prompts, TOKENS, 0.8).ids, plain.ids)


def test_every_end_token_ends(target: Target, prompts: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM: the tokenizer's, and those that generation_config.json adds."""
    (first, *_), *_ = argmax(target, prompts, [])
    monkeypatch.setattr(target.model, "generation_config", GenerationConfig(eos_token_id=[9, first]))
    assert end_tokens(target) == [0, 9, first]
    texts = generate(target, prompts, TOKENS)
    assert texts.lengths[0] == 1
    said = [row[:length] for row, length in zip(texts.generated.tolist(), texts.lengths.tolist(), strict=True)]
    assert said == argmax(target, prompts, [0, 9, first])
