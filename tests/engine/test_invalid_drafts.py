# SPDX-License-Identifier: Apache-2.0
"""What damaged heads compute is not sampled from: their drafts are dropped, and the
output is the target's.
"""

from importlib import import_module
from typing import Any

import pytest
import torch
from cases import generate, greedy, prompts
from conftest import Factory, counting, our_log, start_engine

from vllm_ppd.kernels.sampling import INVALID, Sampling
from vllm_ppd.vllm_plugins.methods.early.reader import sampled_reading

NAN = float("nan")
INF = float("inf")
HEADS: dict[str, dict[str, Any]] = {
    "cp": {"condition": "none"},
    "early": {},
    "dynamo": {},
}


def poison(monkeypatch: pytest.MonkeyPatch, kind: str, value: float) -> None:
    """Have one number of the heads be another once they have been read, whatever the
    reader refuses.
    """
    reader = "methods.early.reader" if kind == "early" else f"methods.{kind}"
    module = import_module(f"vllm_ppd.vllm_plugins.{reader}")
    stock = module.load_tensors

    def load(*args: Any) -> Any:
        config, tensors = stock(*args)
        if kind == "early":
            for weight in tensors.values():
                weight[1, 2] = value
        elif kind == "cp":
            tensors["cp.transforms"][1, 0, 2, 3] = value  # of the first draft
        else:
            tensors["head.2.input_layernorm.weight"][3] = value
        return config, tensors

    monkeypatch.setattr(module, "load_tensors", load)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kind", "options", "value"),
    [
        ("cp", {}, NAN),
        ("cp", {"draft_vocab_size": 150}, INF),
        ("cp", {"draft_sample_method": "greedy"}, NAN),
        ("early", {"exit_layer": 3}, NAN),
        ("early", {"gamma": 0.05}, INF),
        ("early", {"exit_layer": 3, "draft_sample_method": "greedy"}, NAN),
        ("dynamo", {"eps_b": 0.0}, NAN),
        ("dynamo", {"draft_sample_method": "greedy"}, INF),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_damaged_heads_change_nothing(
    engine: Factory,
    tiny_model: Factory,
    fitted_heads: Factory,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: dict[str, Any],
    value: float,
) -> None:
    poison(monkeypatch, kind, value)
    params = [
        greedy(12),
        greedy(12, temperature=0.8, seed=3),
        greedy(12, temperature=0.8, top_p=0.9, seed=4),
    ]
    llm = start_engine(
        tiny_model(),
        {
            "method": "ppd" if kind == "early" else kind,
            "model": fitted_heads(kind, **HEADS[kind]),
            **options,
        },
    )
    with our_log() as messages, counting(llm) as seen:
        assert generate(llm, prompts(3), params) == generate(
            engine(on_v2=True), prompts(3), params
        )
    warnings = [message for message in messages if "NaN or infinite logits" in message]
    assert len(warnings) == 1 and len(warnings[0]) <= 300
    # A stand-in may be right
    assert seen["invalid_drafts"] > 20 and seen["accepted"] < 3


def test_a_reading_of_logits_that_are_not_finite_or_nearly_so() -> None:
    logits = torch.randn(5, 9)
    logits[1, 4], logits[2, 4], logits[3, 4], logits[4, 4] = NAN, INF, -INF, 1e37
    heat = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.01])
    for temperature in (heat, torch.zeros(5)):
        valid = (
            sampled_reading(logits, Sampling.random(temperature)).token_ids != INVALID
        ).tolist()
        assert valid == [True, False, False, True, True]
