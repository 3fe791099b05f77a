# SPDX-License-Identifier: Apache-2.0
"""The models that benchmarks run on: inflated ones, an EAGLE head, the demo model,
packed answers, and make's rules.
"""

import itertools
import json
import lzma
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from cases import generate, greedy
from conftest import DEMO, ROOT, start_engine, write_texts
from heads_folders import config_of
from records import templated
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.models.__main__ import COMMANDS
from vllm_ppd.benchmarks.models.answers import UnpackOptions, digest
from vllm_ppd.benchmarks.models.answers import run as unpack
from vllm_ppd.benchmarks.models.corpus import sources, split
from vllm_ppd.benchmarks.models.inflate import (
    InflateOptions,
    inflate_heads,
    inflate_model,
    run,
)
from vllm_ppd.heads.cp.module import CPHead
from vllm_ppd.heads.io import load_tensors, save_heads
from vllm_ppd.vllm_plugins.cli.main import main

HEADS = DEMO.parent / "heads"


@pytest.mark.parametrize(
    ("family", "changes", "times"),
    [
        ("llama", {"tie_word_embeddings": False}, 2),
        (
            "llama",
            {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
            3,
        ),
        ("qwen3", {}, 3),
    ],
)
def test_logits_of_an_inflated_model_are_the_originals(
    tmp_path: Path, family: str, changes: dict[str, Any], times: int
) -> None:
    model = tiny.make_model(tmp_path / "small", family, **changes)
    for path in model.glob("*.safetensors"):
        fill_vectors(path)
    inflate_model(model, tmp_path / "large", times)
    small, large = (
        AutoModelForCausalLM.from_pretrained(folder)
        for folder in (model, tmp_path / "large")
    )
    ids = torch.randint(2, 300, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = small(ids).logits
        inflated = large(ids).logits
    torch.testing.assert_close(
        inflated, expected, rtol=1e-5, atol=2e-5 * float(expected.std())
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


def test_a_recurrent_head_drafts_as_the_original(tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "tiny")
    sizes: dict[str, Any] = {"rank": 2, "condition": "recurrent", "layers": (1,)}
    inflate_model(model, tmp_path / "large", 3)
    head, larger = (
        CPHead(64 * n, 3, inner_size=32 * n, seed=None, **sizes) for n in (1, 3)
    )
    tensors = {
        f"cp.{name}": 0.1 * torch.randn_like(tensor)
        for name, tensor in head.state_dict().items()
    }
    save_heads(
        tmp_path / "head",
        config_of("cp", model, inner_size=32, token_counts=False, **sizes),
        tensors,
    )
    inflate_heads(tmp_path / "head", tmp_path / "large", tmp_path / "heads", 3)
    for module, stored in (
        (head, tensors),
        (larger, load_tensors(tmp_path / "heads")[1]),
    ):
        module.load_state_dict(
            {name.removeprefix("cp."): tensor for name, tensor in stored.items()}
        )
    final = torch.randn(5, 64)
    layer = torch.randn(5, 64)
    embedded = torch.randn(5, 2, 64)
    expected = torch.nn.functional.pad(
        head.states(torch.cat([final, layer], dim=-1), embedded), (0, 128)
    )
    # The target's last norm is zero there
    padded = torch.nn.functional.pad(final, (0, 128))
    states = larger.states(
        torch.cat([padded, layer, layer, layer], dim=-1), embedded.repeat(1, 1, 3)
    )
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def test_other_families_are_not_inflated(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="'gpt_neox' is not one of llama"):
        inflate_model(
            tiny.make_model(tmp_path / "neox", "gpt_neox"), tmp_path / "large", 2
        )


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
    heads = HEADS / kind
    assert (
        run(
            InflateOptions(
                model=str(DEMO), heads=(str(heads),), times=2, out=str(tmp_path)
            )
        )
        == 0
    )
    options = {
        "num_speculative_tokens": 2,
        **({"exit_layer": 9} if kind == "early" else {}),
    }
    results = []
    for model, folder in (
        (DEMO, heads),
        (tmp_path / "model", tmp_path / "heads" / kind),
    ):
        llm = start_engine(
            model, {**options, "model": str(folder)}, kv_cache_memory_bytes=1 << 28
        )
        results.append((generate(llm, REQUESTS, greedy(40)), llm.counts))
    (texts, counts), (inflated_texts, inflated_counts) = results
    assert texts == inflated_texts
    # Logits are equal to rounding, which decides between drafts that are as likely: a
    # few tokens change.
    assert inflated_counts == pytest.approx(counts, rel=0.03, abs=2)
    assert counts["accepted"] > 20


@pytest.mark.full
@pytest.mark.engine
def test_an_eagle_head_drafts_in_vllm(tmp_path: Path) -> None:
    """A few steps of training get drafts accepted: what is trained is what vLLM runs."""
    data = write_texts(tmp_path / "train.jsonl", split()[0][:60])
    out = tmp_path / "eagle"
    words = [
        "--steps",
        "64",
        "--batch-size",
        "4",
        "--sequence-length",
        "256",
        "--evaluation-tokens",
        "4096",
    ]
    assert (
        main(
            [
                "eagle",
                *words,
                "--model",
                str(DEMO),
                "--data",
                str(data),
                "--out",
                str(out),
            ],
            COMMANDS,
            "models",
        )
        == 0
    )
    plain = generate(
        start_engine(DEMO, None, kv_cache_memory_bytes=1 << 28), REQUESTS, greedy(40)
    )
    config: dict[str, Any] = {
        "method": "eagle",
        "model": str(out),
        "num_speculative_tokens": 3,
    }
    llm = start_engine(DEMO, config, kv_cache_memory_bytes=1 << 28)
    assert generate(llm, REQUESTS, greedy(40)) == plain
    assert llm.counts["accepted"] > 0


def test_a_demo_model_is_trained_and_loads(tmp_path: Path) -> None:
    data = write_texts(
        tmp_path / "train.jsonl", [text for _, text in itertools.islice(sources(), 30)]
    )
    words = [
        "--layers",
        "2",
        "--hidden",
        "96",
        "--sequence-length",
        "64",
        "--evaluation-tokens",
        "512",
    ]
    words += [
        "--vocabulary",
        "257",
        "--steps",
        "12",
        "--data",
        str(data),
        "--out",
        str(tmp_path / "model"),
    ]
    assert main(["train", *words], COMMANDS, "models") == 0
    facts = json.loads((tmp_path / "model" / "provenance.json").read_text())
    assert (
        facts["held_out_after"]["nats_a_token"]
        < facts["held_out_before"]["nats_a_token"]
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers == 2 and model.dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 257


def test_answers_come_back_with_the_prompts_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = templated("{{ messages[-1].content }}")
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda _: tokenizer
    )
    ids = {text: tokenizer(text)["input_ids"] for text in ("one", "two")}
    with lzma.open(tmp_path / "answers.jsonl.xz", "wt") as lines:
        for text, answer in (("one", [9]), ("two", [7, 8])):
            lines.write(
                json.dumps(
                    {"prompt": digest(ids[text]), "token_ids": answer, "end": "stop"}
                )
                + "\n"
            )
    chat = {"messages": [{"role": "user", "content": "two"}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(chat) + "\n")
    names = {
        "answers": "answers.jsonl.xz",
        "prompts": "prompts.jsonl",
        "out": "out.jsonl",
    }
    unpack(
        UnpackOptions(
            model="M", **{name: str(tmp_path / file) for name, file in names.items()}
        )
    )
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {
        "prompt_token_ids": ids["two"],
        "token_ids": [7, 8],
        "finish_reason": "stop",
        "index": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "target", "drafts"),
    [
        ((), "benchmarks/demo/model", "ppd"),
        (("HEADS=cp",), "benchmarks/demo/model", "benchmarks/demo/heads/cp"),
        (
            ("MODEL=smollm", "HEADS=cp"),
            "build/smollm/model",
            "benchmarks/smollm/heads/cp",
        ),
        (("MODEL=/models/other", "HEADS=/some/heads"), "/models/other", "/some/heads"),
    ],
)
def test_make_serve_takes_heads_of_the_model(
    tmp_path: Path, arguments: tuple[str, ...], target: str, drafts: str
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (".venv/.setup-done", "pyproject.toml", ".ci/install.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for folder in ("benchmarks/demo/heads/cp", "benchmarks/smollm/heads/cp"):
        (tmp_path / folder).mkdir(parents=True)
    command = ["make", "-n", "serve", *arguments]
    printed = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert f"vllm serve {target} --port 8000 --speculative-model {drafts} " in printed
    assert ("benchmarks.models smollm" in printed) == ("MODEL=smollm" in arguments)
