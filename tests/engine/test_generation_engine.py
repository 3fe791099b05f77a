# SPDX-License-Identifier: Apache-2.0
"""`ppd data` through vLLM: what the engine writes is the model's own, seeded, ended and cut as asked."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Factory, keep_alive
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_ppd.heads.generation.options import DataOptions
from vllm_ppd.heads.generation.write import Continuation, Request
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.cli.main import main
from vllm_ppd.vllm_plugins.engine import generation

pytestmark = pytest.mark.engine
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def model(tiny_model: Factory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(tiny_model(), tmp_path_factory.mktemp("chatty") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> generation.OfflineEngine:
    """One for all tests, which `ppd data` is given as well."""
    options = DataOptions(model=str(model), out="-", batch=4, max_length=128, precision="float32")
    engine = generation.OfflineEngine(options)
    keep_alive(engine)
    return engine


def run(engine: generation.OfflineEngine, *requests: Request) -> dict[str, Continuation]:
    for request in requests:
        engine.submit(request)
    ended: dict[str, Continuation] = {}
    while len(ended) < len(requests):
        ended |= {continuation.key: continuation for continuation in engine.step()}
    return ended


def test_requests_are_sampled_as_they_ask(engine: generation.OfflineEngine, model: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    greedy = target.generate(ids, max_new_tokens=12, do_sample=False)[0, len(PROMPT) :].tolist()
    ended = run(
        engine,
        Request("greedy", PROMPT, 0.0, 1.0, 12, 1),
        Request("narrow", PROMPT, 1.0, 1e-6, 12, 2),  # the likeliest token alone is within top-p
        Request("a", PROMPT, 1.0, 0.95, 12, 3),
        Request("again", PROMPT, 1.0, 0.95, 12, 3),
        Request("b", PROMPT, 1.0, 0.95, 12, 4),
        Request("whole", PROMPT, 1.0, 1.0, 12, 5),
    )
    assert ended["greedy"].ids == ended["narrow"].ids == greedy
    assert ended["a"].ids == ended["again"].ids != ended["b"].ids
    assert ended["a"].ids != greedy
    assert {len(x.ids) for x in ended.values() if x.finish_reason == "length"} == {12}


def test_tokens_are_counted_as_they_are_generated(engine: generation.OfflineEngine) -> None:
    before = engine.generated
    engine.submit(Request("counted", PROMPT, 0.0, 1.0, 6, 1))
    counts, ended = [], []
    while not ended:
        ended = engine.step()
        counts.append(engine.generated - before)
    assert counts == sorted(counts) and counts[0] < counts[-1] == len(ended[0].ids)


def test_requests_end_as_they_ask(engine: generation.OfflineEngine) -> None:
    words = run(engine, Request("text", PROMPT, 0.0, 1.0, 12, 1, wants_text=True))["text"]
    stop = words.ids[4]
    at = words.ids.index(stop) + 1
    ended = run(
        engine,
        Request("id", PROMPT, 0.0, 1.0, 12, 1, stop_ids=(stop,), wants_text=True),
        Request("word", PROMPT, 0.0, 1.0, 12, 1, stop_text=words.text[4:6], wants_text=True),
    )
    assert (ended["id"].ids, ended["id"].finish_reason) == (words.ids[:at], "stop")
    assert ended["word"].finish_reason == "stop"
    assert ended["word"].text == words.text.partition(words.text[4:6])[0]


def test_chats_are_answered_and_trained_on(
    engine: generation.OfflineEngine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A run that goes on writes what a whole one does; the file is trained on as it is."""
    monkeypatch.setattr(generation, "OfflineEngine", lambda _: engine)
    words = AutoTokenizer.from_pretrained(model)
    asked = tmp_path / "asked.jsonl"
    texts = [f"what is {i} and {i}?" for i in range(6)]
    asked.write_text("".join(json.dumps({"messages": [{"role": "user", "content": t}]}) + "\n" for t in texts))

    def written(name: str, *more: str) -> list[dict[str, Any]]:
        out = tmp_path / name
        argv = ["data", "--model", str(model), "--out", str(out), "--batch", "4", "--max-length", "128"]
        assert main([*argv, "--prompts", str(asked), "--max-tokens", "24", "--temperature", "1", *more]) == 0
        return [json.loads(line) for line in out.read_text().splitlines()]

    chats = written("whole.jsonl")
    assert "6 chats, " in capsys.readouterr().out
    for chat, text in zip(chats, texts, strict=True):
        assert words.decode(chat["prompt_token_ids"]) == f"<user>{text}<|end|><assistant>"
        assert (chat["token_ids"][-1] == words.eos_token_id) == (chat["finish_reason"] == "stop")
    assert written("parts.jsonl", "--number", "2") == chats[:2]
    assert written("parts.jsonl") == chats
    heads = tmp_path / "heads"
    train = ["train", "early", "--model", str(model), "--data", str(tmp_path / "whole.jsonl"), "--steps", "1"]
    assert main([*train, "--sequence-length", "64", "--batch-size", "1", "--out", str(heads), "--device", "cpu"]) == 0
    assert json.loads((heads / "provenance.json").read_text())["documents_in_data"] == 6


def test_cores_memory_and_precision_are_the_machines_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_cpu", lambda: True)
    monkeypatch.setattr(generation.os, "sched_getaffinity", lambda _: {3, 1, 2}, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    options = DataOptions(model="any", out="-")
    arguments = generation.engine_arguments(options)
    assert generation.os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert arguments["dtype"] == "float32" and "kv_cache_memory_bytes" not in arguments
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    arguments = generation.engine_arguments(options.model_copy(update={"precision": "bfloat16"}))
    assert generation.os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "1,2,3"
    assert arguments["dtype"] == "bfloat16"
    assert 0 < arguments["kv_cache_memory_bytes"] <= generation.CPU_CACHE
    arguments = generation.engine_arguments(options.model_copy(update={"kv_cache_gib": 0.5}))
    assert arguments["kv_cache_memory_bytes"] == 1 << 29
    monkeypatch.setattr(platform, "is_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = generation.engine_arguments(options.model_copy(update={"kv_cache_gib": 2}))
    assert (arguments["kv_cache_memory_bytes"], arguments["gpu_memory_utilization"]) == (2 << 30, 0.01)
