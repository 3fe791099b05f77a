# SPDX-License-Identifier: Apache-2.0
"""The models that benchmarks run on: inflated ones, an EAGLE head, packed answers, and
make's rules.
"""

import json
import lzma
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from cases import generate, greedy
from conftest import DEMO, ROOT, accepting, start_engine, write_texts
from records import templated
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vllm_ppd.benchmarks.models.__main__ import COMMANDS
from vllm_ppd.benchmarks.models.inflate import (
    InflateOptions,
    inflate_model,
    run,
)
from vllm_ppd.benchmarks.models.texts import DIGITS, UnpackOptions, split, unpack
from vllm_ppd.benchmarks.storage import BenchError
from vllm_ppd.heads.files import digest_of_value
from vllm_ppd.vllm_plugins.cli.main import main

HEADS = DEMO.parent / "heads"


BIASED = {
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
}


@pytest.mark.parametrize(
    ("family", "changes", "times"),
    [
        ("llama", {"tie_word_embeddings": False}, 2),
        ("llama", BIASED, 3),
        ("qwen3", {}, 3),
    ],
)
@torch.no_grad()
def test_logits_of_an_inflated_model_are_the_originals(
    tmp_path: Path, family: str, changes: dict[str, Any], times: int
) -> None:
    model = tiny.make_model(tmp_path / "small", family, **changes)
    for path in model.glob("*.safetensors"):
        fill_vectors(path)
    inflate_model(model, tmp_path / "large", times)
    small = AutoModelForCausalLM.from_pretrained(model)
    large = AutoModelForCausalLM.from_pretrained(tmp_path / "large")
    ids = torch.randint(
        2, 300, (3, 40), generator=torch.Generator().manual_seed(0)
    )
    expected = small(ids).logits
    torch.testing.assert_close(
        large(ids).logits, expected, rtol=1e-5, atol=2e-5 * float(expected.std())
    )
    assert large.config.hidden_size == times * small.config.hidden_size


def fill_vectors(path: Path) -> None:
    """Fresh biases are zero, and fresh norms one, which would hide a wrong rule."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(path)
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})


def test_other_families_are_not_inflated(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="'gpt_neox' is not one of llama"):
        inflate_model(
            tiny.make_model(tmp_path / "neox", "gpt_neox"), tmp_path / "large", 2
        )


MEMORY = {"kv_cache_memory_bytes": 1 << 28}
REQUESTS = [
    {"prompt_token_ids": [(11 * i + j * j) % 4000 + 2 for j in range(24)]}
    for i in range(8)
]


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize("kind", ["early", "cp", "dynamo"])
def test_an_inflated_engine_says_and_accepts_what_the_original_does(
    tmp_path: Path, kind: str
) -> None:
    heads = str(HEADS / kind)
    run(
        InflateOptions(
            model=str(DEMO), heads=(heads,), times=2, out=str(tmp_path)
        )
    )
    options: dict[str, Any] = {"num_speculative_tokens": 2}
    if kind == "early":
        options["exit_layer"] = 9
    llm = start_engine(DEMO, options | {"model": heads}, **MEMORY)
    texts = generate(llm, REQUESTS, greedy(40))
    options["model"] = str(tmp_path / "heads" / kind)
    inflated = start_engine(tmp_path / "model", options, **MEMORY)
    assert generate(inflated, REQUESTS, greedy(40)) == texts
    # Logits are equal to rounding, which decides between drafts that are as likely: a
    # few tokens change.
    assert inflated.counts == pytest.approx(llm.counts, rel=0.03, abs=2)
    assert llm.counts["accepted"] > 20


@pytest.mark.full
@pytest.mark.engine
def test_an_eagle_head_drafts_in_vllm(tmp_path: Path) -> None:
    """A few steps of training get drafts accepted: what is trained is what vLLM runs."""
    data = write_texts(tmp_path / "train.jsonl", split()[0][:60])
    out = tmp_path / "eagle"
    words = f"eagle --model {DEMO} --data {data} --out {out} --steps 64 --batch-size 4"
    sizes = (
        "--sequence-length 256 --evaluation-tokens 4096 --train-vocab-size 2048"
    )
    assert main([*words.split(), *sizes.split()], COMMANDS, "models") == 0
    plain = generate(start_engine(DEMO, None, **MEMORY), REQUESTS, greedy(40))
    for folder in (out, out / "whole"):
        config = {
            "method": "eagle3",
            "model": str(folder),
            "num_speculative_tokens": 3,
        }
        llm = start_engine(DEMO, config, **MEMORY)
        with accepting(llm):
            assert generate(llm, REQUESTS, greedy(40)) == plain


def test_answers_come_back_with_the_prompts_that_are_there(
    tmp_path: Path,
) -> None:
    tokenizer = templated("{{ messages[-1].content }}")
    tokenizer.save_pretrained(tmp_path)
    one, two = tokenizer(["one", "two"])["input_ids"]
    with lzma.open(tmp_path / "answers", "wt") as lines:
        for prompt, answer in ((one, [9]), (two, [7, 8])):
            digest = digest_of_value(prompt)[:DIGITS]
            line = {
                "prompt": digest,
                "token_ids": answer,
                "end": "stop",
            }
            lines.write(json.dumps(line) + "\n")
    chat = {"messages": [{"role": "user", "content": "two"}]}
    # U+2028 ends a line for str.splitlines, not in a file of JSON lines
    other = {"messages": [{"role": "user", "content": "a\u2028b"}]}
    lines_of_prompts = [
        json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in (other, chat)
    ]
    (tmp_path / "prompts").write_text("".join(lines_of_prompts), encoding="utf-8")
    given = {name: str(tmp_path / name) for name in ("answers", "prompts", "out")}
    unpack(UnpackOptions(model=str(tmp_path), **given))
    assert json.loads((tmp_path / "out").read_text()) == {
        "prompt_token_ids": two,
        "token_ids": [7, 8],
        "finish_reason": "stop",
        "index": 1,
    }


SMOLLM = "build/smollm/model", "benchmarks/smollm/heads/cp"


@pytest.mark.parametrize(
    ("arguments", "target", "drafts"),
    [
        ((), "benchmarks/demo/model", "ppd"),
        (("MODEL=smollm", "HEADS=cp"), *SMOLLM),
        (
            ("MODEL=/models/other", "HEADS=/some/heads"),
            "/models/other",
            "/some/heads",
        ),
    ],
)
def test_make_serve_takes_heads_of_the_model(
    arguments: tuple[str, ...], target: str, drafts: str
) -> None:
    command = ["make", "-n", "serve", "-o", "setup", *arguments]
    printed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert (
        f"vllm serve {target} --port 8000 --speculative-model {drafts} "
        in printed
    )
    assert ("benchmarks.models smollm" in printed) == (
        "MODEL=smollm" in arguments
    )
