# SPDX-License-Identifier: Apache-2.0
"""What damaged heads compute is not sampled from: their drafts are dropped, and the output is the target's."""

import logging
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import generate, greedy, prompts
from conftest import Factory, counting, start_engine
from test_sampling import LEVEL, sample, worst

from vllm_ppd.kernels.sampling import INVALID, Sampling
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.host import DraftingHost
from vllm_ppd.vllm_plugins.engine.metrics import COUNTERS
from vllm_ppd.vllm_plugins.methods.early.reader import sampled_reading

NAN, INF = float("nan"), float("inf")
SETTINGS = {"max_num_seqs": 64, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def expected(engine: Factory) -> list[tuple[int, ...]]:
    return sample(engine(**SETTINGS))


def poison(monkeypatch: pytest.MonkeyPatch, kind: str, value: float) -> None:
    """Have one number of the heads be another once they have been read, whatever the reader refuses."""
    reader = "methods.early.reader" if kind == "early" else f"methods.{kind}.drafter"
    module = import_module(f"vllm_ppd.vllm_plugins.{reader}")
    stock = module.load_tensors

    def load(*args: Any) -> Any:
        config, tensors = stock(*args)
        if kind == "early":
            for weight in tensors.values():
                weight[1, 2] = value
        else:
            tensor = tensors["cp.transforms" if kind == "cp" else "head.2.input_layernorm.weight"]
            tensor[(config.factors - config.positions + 1, 0, 2, 3) if kind == "cp" else (3,)] = (
                value  # the first draft's
            )
        return config, tensors

    monkeypatch.setattr(module, "load_tensors", load)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kind", "options", "value"),
    [
        ("cp", {"method": "cp"}, NAN),
        pytest.param("cp", {"method": "cp", "draft_vocab_size": 150}, INF, marks=pytest.mark.full),
        ("cp", {"method": "cp", "draft_sample_method": "greedy"}, NAN),
        ("early", {"method": "ppd", "exit_layer": 3}, NAN),
        ("early", {"method": "ppd", "gamma": 0.05}, INF),
        ("early", {"method": "ppd", "exit_layer": 3, "draft_sample_method": "greedy"}, NAN),
        ("early", {"method": "paradecode", "schedule": "parallel"}, NAN),
        ("dynamo", {"method": "dynamo", "eps_b": 0.0}, NAN),
        pytest.param("dynamo", {"method": "dynamo", "draft_sample_method": "greedy"}, INF, marks=pytest.mark.full),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_damaged_heads_change_nothing(
    engine: Factory, expected: list[tuple[int, ...]], tiny_model: Factory, fitted_heads: Factory,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, options: dict[str, Any], value: float,
) -> None:  # fmt: skip
    poison(monkeypatch, kind, value)
    with caplog.at_level(logging.WARNING, logger="vllm.vllm_ppd"):
        llm = start_engine(tiny_model(), {"model": fitted_heads(kind), **options}, **SETTINGS)
        with counting(llm) as seen:
            assert worst(sample(llm), expected) > LEVEL
            assert generate(llm, prompts(3), greedy(12)) == generate(engine(), prompts(3), greedy(12))
    warnings = [message for message in caplog.messages if "NaN or infinite logits" in message]
    if options.get("schedule") == "parallel":  # what the exits predict is never a draft: the final layer's tokens are
        assert seen["early_predictions"] == seen["early_rejections"] > 1000
        assert seen["drafted"] > 1000
        return
    assert seen["invalid_drafts"] > 1000
    assert len(warnings) == 1 and len(warnings[0]) <= 300
    assert seen["drafted"] == 0


def test_a_reading_of_logits_that_are_not_finite_or_nearly_so() -> None:
    logits = torch.randn(5, 9)
    logits[1, 4], logits[2, 4], logits[3, 4], logits[4, 4] = NAN, INF, -INF, 1e37
    heat = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.01])
    for temperature in (heat, torch.zeros(5)):
        valid = (sampled_reading(logits, Sampling(temperature)).token_ids != INVALID).tolist()
        assert valid == [True, False, False, True, True]


def test_drafts_before_an_invalid_draft_are_used() -> None:
    config = DraftingConfig(method="cp", num_layers=6)
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 9))
    host = DraftingHost(config, vllm_config, torch.device("cpu"), rows=4, num_drafts=3, sampled=True)
    tokens = np.array([[5, 6, 7], [5, INVALID, 7], [5, 6, INVALID], [INVALID, 6, 7]])
    assert host.valid(tokens, np.array([3, 3, 2, 0])).tolist() == [3, 1, 2, 0]
    assert host.counters.values.tolist() == [float(name == "invalid_drafts") for name in COUNTERS]
