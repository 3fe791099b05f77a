# SPDX-License-Identifier: Apache-2.0
"""The trained demo model: it is what its provenance says, and it writes Python."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cases import greedy
from conftest import DEMO, start_engine

from vllm_ppd.benchmarks.models.corpus import is_validation, sources

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


def serve(options: dict[str, Any] | None) -> Any:
    return start_engine(DEMO, options, max_model_len=512, max_num_batched_tokens=512, kv_cache_memory_bytes=1 << 28)


@pytest.mark.engine
def test_writes_python() -> None:
    """Asked for a method, it writes one: a line that Python's own tokenizer takes for code, indented as a body is."""
    llm = serve(None)
    prompt = "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def "
    text = llm.generate([prompt], greedy(40), use_tqdm=False)[0].outputs[0].text
    assert "(self" in text
    assert "\n        " in text
