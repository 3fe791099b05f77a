# SPDX-License-Identifier: Apache-2.0
"""The demo model: the committed files, and how such a model is trained."""

import itertools
import json
from pathlib import Path

import torch
from conftest import DEMO, write_texts
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_ppd.benchmarks.models.__main__ import COMMANDS
from vllm_ppd.benchmarks.models.corpus import sources
from vllm_ppd.vllm_plugins.cli.main import main


def test_fits_the_repository() -> None:
    files = [path for path in DEMO.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 16 << 20
    provenance = json.loads((DEMO / "provenance.json").read_text())
    assert provenance["validation_loss_nats_per_token"] < 3.0
    assert {path.suffix for path in files} <= {".json", ".safetensors"}


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
