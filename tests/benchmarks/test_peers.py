# SPDX-License-Identifier: Apache-2.0
"""Peers of the demo model: what is trained is what vLLM runs, and inflated they draft the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import generate, greedy
from conftest import DEMO, ROOT, start_engine

from vllm_ppd.benchmarks.models.inflate import inflate_model

PEERS = ("medusa", "eagle", "draft_model")


@pytest.fixture(scope="module")
def inflated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inflated")
    inflate_model(DEMO, folder, lambda own: 5 * own)
    return folder


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize("peer", PEERS)
def test_peer_drafts_in_vllm_and_inflated_the_same(peer: str, inflated: Path, tmp_path: Path) -> None:
    """A few steps of training already get drafts accepted; greedy tokens are those without speculation."""
    module = [sys.executable, "-m", "vllm_ppd.benchmarks.models.peers"]
    trained = [f"{module[-1]}.train", peer, "--steps", "24", "--out", str(tmp_path / peer)]
    subprocess.run([*module[:-1], *trained], check=True, cwd=ROOT)
    grown = [f"{module[-1]}.inflate", "--peers", str(tmp_path / peer), "--model", str(inflated), "--out"]
    subprocess.run([*module[:-1], *grown, str(tmp_path / "large")], check=True, cwd=ROOT)
    requests = [{"prompt_token_ids": [(11 * i + j * j) % 4000 + 2 for j in range(24)]} for i in range(8)]
    plain = generate(start_engine(DEMO, None, kv_cache_memory_bytes=1 << 28), requests, greedy(40))
    counts = []
    for model, folder in ((DEMO, tmp_path / peer), (inflated, tmp_path / "large" / peer)):
        config: dict[str, Any] = {"method": peer, "model": str(folder), "num_speculative_tokens": 3}
        llm = start_engine(model, config, kv_cache_memory_bytes=1 << 28)
        assert generate(llm, requests, greedy(40)) == plain
        counts.append(llm.counts)
    assert counts[0] == counts[1]
    assert counts[0]["accepted"] > 0
