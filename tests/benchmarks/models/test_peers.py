# SPDX-License-Identifier: Apache-2.0
"""Peers of the demo model: what is trained is what vLLM runs, and inflated they draft the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import generate, greedy
from conftest import DEMO, start_engine, write_texts

from vllm_ppd.benchmarks.models import peers
from vllm_ppd.benchmarks.models.__main__ import COMMANDS
from vllm_ppd.benchmarks.models.corpus import split
from vllm_ppd.vllm_plugins.cli.main import main


def make(*arguments: str) -> None:
    assert main(arguments, COMMANDS, "models") == 0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few files of the corpus."""
    return write_texts(tmp_path_factory.mktemp("data") / "train.jsonl", split()[0][:60])


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize("peer", peers.PEERS)
def test_peer_drafts_in_vllm_and_inflated_the_same(peer: str, data: Path, tmp_path: Path) -> None:
    """A few steps of training already get drafts accepted; greedy tokens are those without speculation."""
    trained = ("--model", str(DEMO), "--data", str(data), "--out", str(tmp_path / peer), "--evaluation-tokens", "4096")
    make("peer", peer, "--steps", "64", "--batch-size", "4", "--sequence-length", "256", *trained)
    large = ("--peers", str(tmp_path / peer), "--times", "2", "--out", str(tmp_path / "large"))
    make("inflate", "--model", str(DEMO), *large)
    requests = [{"prompt_token_ids": [(11 * i + j * j) % 4000 + 2 for j in range(24)]} for i in range(8)]
    plain = generate(start_engine(DEMO, None, kv_cache_memory_bytes=1 << 28), requests, greedy(40))
    counts = []
    large_peer = tmp_path / "large" / "peers" / peer
    for model, folder in ((DEMO, tmp_path / peer), (tmp_path / "large" / "model", large_peer)):
        config: dict[str, Any] = {"method": peer, "model": str(folder), "num_speculative_tokens": 3}
        llm = start_engine(model, config, kv_cache_memory_bytes=1 << 28)
        assert generate(llm, requests, greedy(40)) == plain
        counts.append(llm.counts)
    assert counts[0] == counts[1]
    assert counts[0]["accepted"] > 0
