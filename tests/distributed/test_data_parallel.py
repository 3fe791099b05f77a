# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel engines of a real server: each drafts and chooses for itself."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO
from prometheus_client.parser import text_string_to_metric_families
from server import Server

pytestmark = [pytest.mark.engine, pytest.mark.ranks, pytest.mark.full]

HEADS = DEMO.parent / "heads" / "cp"
REQUESTS = 6


def by_engine(server: Server, name: str) -> dict[str, float]:
    """A series of /metrics by its engine, summed over its other labels."""
    values: dict[str, float] = {}
    text = server.http.get("/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                engine = sample.labels["engine"]
                values[engine] = values.get(engine, 0.0) + sample.value
    return values


def test_each_engine_drafts_and_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    flags = f"--data-parallel-size 2 --speculative-model {HEADS}"
    server = Server(DEMO, tmp_path / "log", *flags.split())

    def text(**body: Any) -> str:
        answer = server.complete(max_tokens=64, **body).json()
        return str(answer["choices"][0]["text"])

    try:
        alone = text(vllm_xargs={"ppd_draft": False})
        with ThreadPoolExecutor(REQUESTS) as pool:
            texts = list(pool.map(lambda _: text(), range(REQUESTS)))
        assert set(texts) == {alone}
        accepted = by_engine(server, "vllm:spec_decode_num_accepted_tokens_total")
        steps = by_engine(server, "ppd:served_steps_total")
    finally:
        server.stop()
    assert set(accepted) == {"0", "1"} and min(accepted.values()) > 0
    assert set(steps) == {"0", "1"} and min(steps.values()) > 0
