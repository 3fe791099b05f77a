# SPDX-License-Identifier: Apache-2.0
"""The trained demo model: it is what its provenance says, and it writes Python."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from cases import greedy
from conftest import DEMO, start_engine, write_texts
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_ppd.benchmarks.models.__main__ import COMMANDS
from vllm_ppd.benchmarks.models.corpus import is_validation, sources
from vllm_ppd.vllm_plugins.cli.main import main

LIMIT_BYTES = 16 << 20


def test_fits_the_repository() -> None:
    files = [path for path in DEMO.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LIMIT_BYTES
    provenance = json.loads((DEMO / "provenance.json").read_text())
    assert provenance["validation_loss_nats_per_token"] < 3.0
    config = json.loads((DEMO / "config.json").read_text())
    assert config["num_hidden_layers"] >= 8
    assert {path.suffix for path in files} <= {".json", ".safetensors"}


def test_held_out_files_are_not_trained_on() -> None:
    names = [name for name, _ in sources()]
    assert len(names) > 500
    assert 0.005 < sum(map(is_validation, names)) / len(names) < 0.05


def test_a_model_of_bytes_is_trained_and_loads(tmp_path: Path) -> None:
    """The loop's checkpoints, curve and provenance are beside it; nothing of the untrained model is left."""
    data = write_texts(tmp_path / "train.jsonl", [text for _, text in itertools.islice(sources(), 30)])
    small = ("--layers", "2", "--hidden", "96", "--sequence-length", "64", "--evaluation-tokens", "512")
    arguments = ["train", "--vocabulary", "257", "--steps", "12", *small, "--data", str(data), "--out"]
    assert main([*arguments, str(tmp_path / "model")], COMMANDS, "models") == 0
    facts = json.loads((tmp_path / "model" / "provenance.json").read_text())
    assert facts["held_out_after"]["nats_a_token"] < facts["held_out_before"]["nats_a_token"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers == 2 and model.dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 257
    assert not (tmp_path / "model" / "untrained").exists()


@pytest.mark.engine
def test_writes_python() -> None:
    """Asked for a method, it writes one: a line that Python's own tokenizer takes for code, indented as a body is."""
    llm = start_engine(DEMO, None, max_model_len=512, max_num_batched_tokens=512, kv_cache_memory_bytes=1 << 28)
    prompt = "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def "
    text = llm.generate([prompt], greedy(40), use_tqdm=False)[0].outputs[0].text
    assert "(self" in text
    assert "\n        " in text
