# SPDX-License-Identifier: Apache-2.0
"""The trained demo model: it is what its provenance says, and its exits are accepted as often as was measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cases import generate, greedy
from conftest import DEMO, ROOT, start_engine
from vllm import SamplingParams

from vllm_ppd.benchmarks.models.acceptance import texts_of, variants
from vllm_ppd.benchmarks.models.corpus import is_validation, sources
from vllm_ppd.heads.io import load_config

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


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return texts_of(16)


def serve(options: dict[str, Any] | None) -> Any:
    return start_engine(DEMO, options, max_model_len=512, max_num_batched_tokens=512, kv_cache_memory_bytes=1 << 28)


def test_variants_draft_from_the_whole_vocabulary_unless_they_say_so() -> None:
    """Whatever the heads' own configurations recommend."""
    found = variants([6], 3, [])
    assert load_config(ROOT / "benchmarks" / "demo" / "heads" / "cp").draft_vocab_size == 1024
    sizes = {name: options.get("draft_vocab_size") for name, options in found.items() if name[:2] in ("cp", "dy")}
    assert sizes.pop("cp, draft vocabulary 1024") == 1024
    assert len(sizes) == 5
    assert set(sizes.values()) == {4096}


@pytest.mark.engine
@pytest.mark.parametrize("exit_layer", [6, 11])
def test_acceptance_and_exactness(texts: list[str], exit_layer: int) -> None:
    """Floors are 90 % of benchmarks/results/demo_acceptance.json, for sampled drafts at temperature 0.8."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "demo_acceptance.json").read_text())["rows"]
    expected = next(
        row["rate"]
        for row in measured
        if row["method"] == f"ppd, exit {exit_layer}, no heads" and row["setting"] == "T 0.8"
    )
    llm = serve({"method": "ppd", "exit_layer": exit_layer})
    assert generate(llm, texts, greedy(48)) == generate(serve(None), texts, greedy(48))
    before = llm.counts.copy()
    generate(llm, texts * 4, SamplingParams(temperature=0.8, max_tokens=64, ignore_eos=True))
    seen = llm.counts - before
    assert seen["accepted"] / seen["drafted"] > 0.9 * expected


@pytest.mark.engine
def test_writes_python() -> None:
    """Asked for a method, it writes one: a line that Python's own tokenizer takes for code, indented as a body is."""
    llm = serve(None)
    prompt = "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def "
    text = llm.generate([prompt], greedy(40), use_tqdm=False)[0].outputs[0].text
    assert "(self" in text
    assert "\n        " in text
