# SPDX-License-Identifier: Apache-2.0
"""`ppd bench group`: who is compared, and the theorem it is held against."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, cells_of

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode.group import contenders, split_of, table, theorem
from vllm_ppd.benchmarks.decode.options import GroupOptions
from vllm_ppd.benchmarks.harness.contenders import BASE
from vllm_ppd.benchmarks.harness.results import Results
from vllm_ppd.heads.io import HeadsError


def options(**changes: Any) -> GroupOptions:
    return GroupOptions(**{"model": "model", "data": ("prompts.jsonl",), **changes})


def test_theorem() -> None:
    """PPD, equations 3 and 5: at d_bar = d/2 a token takes d (1 - p/2), and computes ((k + 1) d + d (1 - p)) / 2."""
    for p in (0.0, 0.4, 1.0):
        for k in (1, 3):
            found = theorem(40, 20, k, p)
            assert found.latency == pytest.approx(40 * (1 - p / 2))
            assert found.compute == pytest.approx(((k + 1) * 40 + 40 * (1 - p)) / 2)
    assert theorem(40, 30, 5, 1.0).latency == 30
    # Stages that halve each other's speed gain nothing where every token takes both all the time.
    assert theorem(40, 20, 1, 1.0, slowed=2.0).latency == 40


def test_theorem_of_short_texts() -> None:
    """d l - (d - d_bar) (l - 1) p layers for l tokens, and k (d - d_bar) l more in all."""
    for tokens, p in ((1, 1.0), (5, 0.5), (128, 0.3)):
        found = theorem(40, 30, 3, p, tokens)
        latency = 40 * tokens - 10 * (tokens - 1) * p
        assert found.latency * tokens == pytest.approx(latency)
        assert found.compute * tokens == pytest.approx(latency + 3 * 10 * tokens)


def test_contenders(heads_folder: Callable[..., Path]) -> None:
    heads = str(heads_folder(exit_layers=(4,)))
    found = {c.name: c for c in contenders(options(heads=(heads,), candidates="1,5", micro_steps=6))}
    assert list(found) == [BASE, "vLLM, again", "group, k = 1", "group, k = 5", "TP 2"]
    config = found["group, k = 5"].speculative_config
    assert config == {
        "method": "ppd", "model": heads, "num_speculative_tokens": 5, "candidates": 5, "disable_by_batch_size": 1,
    }  # fmt: skip
    assert split_of(config, 6) == 4
    assert options().engine_arguments["pipeline_parallel_size"] == 2
    assert found["TP 2"].engine == {"pipeline_parallel_size": 1, "tensor_parallel_size": 2}
    with pytest.raises(BenchError, match="one folder of early heads"):
        contenders(options(heads=(heads, heads)))
    with pytest.raises(HeadsError, match="kind 'cp'"):
        contenders(options(heads=(str(DEMO.parent / "heads" / "cp"),)))


def test_table(tmp_path: Path) -> None:
    """Half the candidates' tokens were right: 6 layers less 3 p; the layers that ran are counted, whatever p is."""
    made = options(out=str(tmp_path / "bench.json"), candidates=(2,), new_tokens=21)
    results = Results(made, contenders(made))
    turn = {
        "batch": 1, "group": 0, "round": 0, "window_tokens": 20, "steps": 10, "window_seconds": 1.0,
        "step_seconds": 0.1, "worker_seconds": None, "draft_seconds": None, "same_tokens": 9, "compared_tokens": 10,
        "peak_bytes": 5, "drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "repeated_4_grams": 0, "all_4_grams": 0,
    }  # fmt: skip
    ours = {
        "group_micro_steps": 22.0, "group_hits": 10.0, "group_misses": 10.0,
        "group_candidates": 40.0, "group_candidates_discarded": 30.0,
        "group_tokens": 20.0, "group_first_stage_layers": 165.0, "group_last_stage_layers": 60.0,
        "group_first_stage_seconds": 1.0, "group_first_stage_idle_seconds": 0.25,
        "group_last_stage_seconds": 1.0, "group_last_stage_idle_seconds": 0.5,
    }  # fmt: skip
    results.add({**turn, "contender": BASE, "ours": {}})
    results.add({**turn, "contender": "group, k = 2", "window_seconds": 0.8, "drafts": 2, "ours": ours})
    _, base, group = cells_of(table(results, 6))
    assert base[:5] == ["1", "PP 2", "20.0 (20.0-20.0)", "1.000 (1.000-1.000)", "-"]
    assert group == [
        "1", "group, k = 2", "25.0 (25.0-25.0)", "1.250 (1.250-1.250)", "0.500", "1.311", "0.953", "1.00", "0.953",
        "11.2", "10.6", "25%", "50%", "90.00%",
    ]  # fmt: skip
