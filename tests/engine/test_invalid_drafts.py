# SPDX-License-Identifier: Apache-2.0
"""What damaged heads compute is not sampled from: their drafts are dropped, and the
output is the target's.
"""

from importlib import import_module
from typing import Any

import pytest
from cases import PLAIN, generate, greedy, prompts
from conftest import Factory, counting, our_log, start_engine

NAN = float("nan")
INF = float("inf")
# The tensor that is damaged, of which number, and the module that reads it
DAMAGES: dict[str, tuple[str, tuple[int, ...], str]] = {
    "early": ("", (1, 2), "early.drafter"),
    "cp": ("cp.transforms", (1, 0, 2, 3), "cp"),  # of the first draft
    "dynamo": ("head.2.input_layernorm.weight", (3,), "dynamo"),
}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("method", "options", "value"),
    [
        ("cp", {"draft_vocab_size": 150}, INF),
        ("cp", {"draft_sample_method": "greedy"}, NAN),
        ("early", {"gamma": 0.05}, INF),
        ("early", {"exit_layer": 2, "draft_sample_method": "greedy"}, NAN),
        ("dynamo", {"eps_b": 0.0}, NAN),
        ("dynamo", {"draft_sample_method": "greedy"}, INF),
    ],
)
def test_damaged_heads_change_nothing(
    engine: Factory,
    tiny_model: Factory,
    fitted_heads: Factory,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    options: dict[str, Any],
    value: float,
) -> None:
    """One number of the heads is another once they have been read, whatever the reader
    refuses.
    """
    damaged, place, reader = DAMAGES[method]
    module = import_module(f"vllm_ppd.vllm_plugins.methods.{reader}")
    stock = module.load_tensors

    def load(*args: Any) -> Any:
        config, tensors = stock(*args)
        for name, tensor in tensors.items():
            if name.startswith(damaged) and tensor.is_floating_point():
                tensor[place] = value
        return config, tensors

    monkeypatch.setattr(module, "load_tensors", load)
    params = [
        greedy(12),
        greedy(12, temperature=0.8, seed=3),
        greedy(
            12,
            temperature=0.8,
            top_p=0.9,
            seed=4,
        ),
    ]
    how = PLAIN[1] if method == "cp" else {}
    heads = {"method": method, "model": fitted_heads(method, **how)}
    llm = start_engine(tiny_model(), heads | options)
    expected = generate(engine(on_v2=True), prompts(3), params)
    with our_log() as messages, counting(llm) as seen:
        assert generate(llm, prompts(3), params) == expected
    warnings = [
        message for message in messages if "NaN or infinite logits" in message
    ]
    assert len(warnings) == 1 and len(warnings[0]) <= 300
    # A stand-in may be right
    assert seen["invalid_drafts"] > 20 and seen["accepted"] < 3
