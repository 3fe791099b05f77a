# SPDX-License-Identifier: Apache-2.0
"""Targets that differ from Llama in their text model, their logits or their LM head:
heads are trained, calibrated and served, and as many drafts are accepted as foretold.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_multimodal
import torch
import transformers as tf
from cases import greedy, prompts, tokens_of
from conftest import Factory, start_engine
from records import write
from test_demo_heads import counted

from vllm_ppd.heads.calibration.acceptance import generate
from vllm_ppd.heads.calibration.run import open_calibration
from vllm_ppd.heads.cp.calibration import by_drafts
from vllm_ppd.heads.cp.config import CPOptions
from vllm_ppd.heads.cp.module import CPHead
from vllm_ppd.heads.folder import load_config
from vllm_ppd.heads.options import CalibrationOptions
from vllm_ppd.heads.training import loop
from vllm_ppd.heads.training.target import Target
from vllm_ppd.vllm_plugins.cli.main import main

pytestmark = pytest.mark.engine
TOKENS = 24
DRAFTS = 2


def gemma2(folder: Path) -> Path:
    config = tiny.config_of(
        "gemma3",
        model_type="gemma2",
        num_hidden_layers=2,
        final_logit_softcapping=4.0,
        attn_logit_softcapping=None,
    )
    torch.manual_seed(0)
    return tiny.save(tf.AutoModelForCausalLM.from_config(config), folder)


def biased(folder: Path) -> Path:
    config = tf.GPTJConfig(
        vocab_size=tiny.VOCAB,
        n_positions=256,
        n_embd=64,
        n_layer=2,
        n_head=2,
        rotary_dim=16,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = tf.GPTJForCausalLM(config)
    model.lm_head.bias.data.normal_()
    return tiny.save(model, folder)


TARGETS: dict[str, Callable[[Path], Any]] = {
    "gemma3": lambda folder: tiny_multimodal.with_images(folder, "gemma3"),
    "qwen2_5_vl": lambda folder: tiny_multimodal.with_images(
        folder, "qwen2_5_vl"
    ),
    "granite": lambda folder: tiny.make_model(
        folder, "granite", num_hidden_layers=2, logits_scaling=3.0
    ),
    "gemma2": gemma2,
    "gptj": biased,
}


@pytest.mark.parametrize("name", TARGETS)
def test_as_many_drafts_are_accepted_as_foretold(
    name: str,
    made_once: Factory,
    tmp_path: Path,
) -> None:
    """From a part of the vocabulary, whose rows of the LM head are read apart."""
    model = made_once(f"trained-{name}", TARGETS[name])
    target = Target(str(model), torch.device("cpu"), torch.float32)
    asked = [request["prompt_token_ids"] for request in prompts(16, 30)]
    said = generate(target, asked, TOKENS)
    answers = zip(asked, said.generated.tolist(), said.lengths, strict=True)
    records = [
        {"prompt_token_ids": prompt, "token_ids": ids[:length]}
        for prompt, ids, length in answers
    ]
    data = write(tmp_path / "data.jsonl", *records * 4)
    heads = str(tmp_path / "heads")
    trained = CPOptions(
        model=str(model),
        data=(data,),
        out=heads,
        steps=60,
        sequence_length=64,
        batch_size=4,
        learning_rate=3e-3,
        dtype="float32",
        device="cpu",
        rank=1,
        num_speculative_tokens=DRAFTS,
        train_vocab_size=200,
    )
    loop.train(trained)
    (architecture,) = load_config(heads).verifier_architectures
    assert architecture == type(target.model).__name__
    options = f"--num-prompts 8 --output-len {TOKENS} --device cpu --no-recommend"
    assert main(f"calibrate {heads} --data {data} {options}".split()) == 0
    calibration = open_calibration(
        CalibrationOptions(
            heads=heads,
            data=(data,),
            num_prompts=8,
            output_len=TOKENS,
            device="cpu",
        )
    )
    settings: dict[str, Any] = {}
    if name in tiny_multimodal.IMAGES:
        tiny_multimodal.register(architecture)
        settings["language_model_only"] = True
    llm = start_engine(
        model,
        {"method": "cp", "model": heads},
        per_request_spec_decode_metrics="detailed",
        **settings,
    )
    requests = [{"prompt_token_ids": ids} for ids in calibration.prompts]
    outputs = llm.generate(requests, greedy(TOKENS), use_tqdm=False)
    texts = calibration.greedy
    ids = torch.tensor(tokens_of(outputs))
    is_text = torch.arange(TOKENS) < texts.lengths[:, None]
    assert torch.equal(ids[is_text], texts.generated[is_text])
    texts = replace(
        texts,
        ids=torch.cat([texts.ids[:, : texts.prompt], ids], dim=1),
        lengths=torch.full_like(texts.lengths, TOKENS),
    )
    token_ids = calibration.draft_vocabulary()
    assert token_ids is not None and len(token_ids) == 200
    counts_of = by_drafts(calibration, texts, token_ids, CPHead).by_drafts
    expected = counts_of[DRAFTS - 1]
    seen = counted(outputs, DRAFTS, TOKENS)
    counts = [seen["drafts"], seen["drafted"], seen["accepted"]]
    foretold = (expected.drafts, expected.drafted, expected.accepted)
    assert counts == [round(value) for value in foretold]
    assert seen["accepted"] > 30
