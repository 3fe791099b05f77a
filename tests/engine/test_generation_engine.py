# SPDX-License-Identifier: Apache-2.0
"""`ppd data` through vLLM: what the engine writes is the model's own, seeded, ended and
cut as asked.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Factory, keep_alive
from records import TEMPLATE, templated, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_ppd.heads.generation import Sampling
from vllm_ppd.heads.options import DataOptions
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.cli.main import main
from vllm_ppd.vllm_plugins.engine import generation

pytestmark = pytest.mark.engine
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def model(
    tiny_model: Factory,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = shutil.copytree(
        tiny_model(), tmp_path_factory.mktemp("chatty") / "model"
    )
    templated(TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> generation.OfflineEngine:
    """One for all tests, which `ppd data` is given as well."""
    options = DataOptions(
        model=str(model),
        out="-",
        batch_size=4,
        max_model_len=128,
        dtype="float32",
    )
    engine = generation.OfflineEngine(options)
    keep_alive(engine)
    return engine


def asked(
    engine: generation.OfflineEngine, temperature: float, **ends: Any
) -> Any:
    """What follows the prompt, of which nothing but the likeliest is left."""
    top_p = 1e-6 if temperature else 1.0
    sampling = Sampling(temperature, top_p, 12, **ends)
    (answer,) = engine.generate([PROMPT], [1], sampling)
    return answer


def test_prompts_are_continued_as_asked(
    engine: generation.OfflineEngine, model: Path
) -> None:
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = target.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False
    )
    greedy = ids[0, len(PROMPT) :].tolist()
    for temperature in (0.0, 1.0):
        assert asked(engine, temperature).token_ids == greedy
    a, again, b = engine.generate(
        [PROMPT] * 3, [3, 3, 4], Sampling(1.0, 0.95, 12)
    )
    assert a.token_ids == again.token_ids != b.token_ids
    assert a.token_ids != greedy


def test_continuations_end_as_asked(engine: generation.OfflineEngine) -> None:
    words = asked(engine, 0.0, detokenize=True)
    assert (words.finish_reason, len(words.token_ids)) == ("length", 12)
    stop = words.token_ids[4]
    text = words.text[4:6]
    by_id = asked(engine, 0.0, stop_token_ids=[stop])
    assert by_id.token_ids == words.token_ids[: words.token_ids.index(stop) + 1]
    by_text = asked(engine, 0.0, stop=[text], detokenize=True)
    assert by_text.text == words.text.partition(text)[0]
    assert by_id.finish_reason == by_text.finish_reason == "stop"


def test_chats_are_answered_and_trained_on(
    engine: generation.OfflineEngine,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """A run that goes on writes what a whole one does; the file is trained on as it is."""
    monkeypatch.setattr(generation, "OfflineEngine", lambda _: engine)
    words = AutoTokenizer.from_pretrained(model)
    texts = [f"what is {i} and {i}?" for i in range(6)]
    chats = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    asked = write(tmp_path / "asked.jsonl", *chats)
    flags = [
        "--batch-size=4",
        "--max-model-len=128",
        "--max-tokens=24",
        "--temperature=1",
    ]

    def written(name: str, *more: str) -> list[dict[str, Any]]:
        out = tmp_path / name
        places = [f"--model={model}", f"--out={out}", f"--prompts={asked}"]
        assert main(["data", *places, *flags, *more]) == 0
        return [json.loads(line) for line in out.read_text().splitlines()]

    whole = written("whole.jsonl")
    assert "6 chats, " in capsys.readouterr().out
    for chat, text in zip(whole, texts, strict=True):
        assert (
            words.decode(chat["prompt_token_ids"])
            == f"<system>be<|end|><user>{text}<|end|>\n<assistant>"
        )
        assert (chat["token_ids"][-1] == words.eos_token_id) == (
            chat["finish_reason"] == "stop"
        )
    assert written("parts.jsonl", "--num-chats", "2") == whole[:2]
    assert written("parts.jsonl") == whole
    heads = tmp_path / "heads"
    places = [
        f"--model={model}",
        f"--out={heads}",
        f"--data={tmp_path}/whole.jsonl",
    ]
    sizes = [
        "--steps=1",
        "--sequence-length=64",
        "--batch-size=1",
        "--device=cpu",
    ]
    assert main(["train", "early", *places, *sizes]) == 0
    assert (
        json.loads((heads / "provenance.json").read_text())["documents_in_data"]
        == 6
    )


def test_cores_memory_and_precision_are_the_machines_unless_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "is_cpu", lambda: True)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: {3, 1, 2}, raising=False
    )
    monkeypatch.setattr(
        generation,
        "cpu_computes_bfloat16",
        lambda: False,
    )
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")

    def arguments_of(**given: Any) -> dict[str, Any]:
        options = DataOptions(model="any", out="-", **given)
        return generation.engine_arguments(options)

    arguments = arguments_of()
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert (
        arguments["dtype"] == "float32"
        and "kv_cache_memory_bytes" not in arguments
    )
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    arguments = arguments_of(dtype="bfloat16")
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "1,2,3"
    assert arguments["dtype"] == "bfloat16"
    assert 0 < arguments["kv_cache_memory_bytes"] <= generation.CPU_CACHE
    arguments = arguments_of(kv_cache_gib=0.5)
    assert arguments["kv_cache_memory_bytes"] == 1 << 29
