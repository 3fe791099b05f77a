# SPDX-License-Identifier: Apache-2.0
"""Rows of padding: where products of more rows are faster, and without a change of what is said."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES
from conftest import drafter_of, runner_of, step_tokens

from vllm_ppd.vllm_plugins.engine.cpu import row_padding
from vllm_ppd.vllm_plugins.engine.cpu.row_padding import NONE, RowPadding

EPYC = (19.7, 23.0, 16.8, 16.0, 15.9, 15.9, 19.7, 21.2)  # milliseconds of one row and more


def seconds_of(*rows: float) -> np.ndarray:
    """[tokens, rows] where padding changes no bit."""
    return np.where(np.triu(np.ones((len(rows), len(rows)), dtype=bool)), rows, np.inf)


def test_passes_have_the_fewest_rows_that_are_fast() -> None:
    padding = RowPadding(seconds_of(*EPYC))
    assert [padding.rows(tokens) for tokens in range(10)] == [0, 4, 4, 4, 4, 5, 6, 7, 8, 9]
    assert [NONE.rows(tokens) for tokens in (1, 2, 8, 100)] == [1, 2, 8, 100]


def test_padding_that_would_change_a_bit_is_not_done() -> None:
    seconds = seconds_of(*EPYC)
    seconds[0, 1:] = seconds[1, 3:6] = np.inf
    padding = RowPadding(seconds)
    assert [padding.rows(tokens) for tokens in range(1, 5)] == [1, 3, 4, 4]


def test_nothing_is_padded_for_what_noise_may_be() -> None:
    padding = RowPadding(seconds_of(1.0, 0.97, 0.99, 1.0))
    assert [padding.rows(tokens) for tokens in range(1, 6)] == [1, 2, 3, 4, 5]


@pytest.mark.engine
def test_products_of_the_loaded_model_are_timed_and_compared(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own layers, as many as are worth a time, and every number of rows that a pass may have."""
    runner = runner_of(engine({"method": "ppd"}))
    products = row_padding._products(runner.model, torch.float32, 3)
    assert len(products) == 4 * runner.model_config.hf_text_config.num_hidden_layers
    seconds = row_padding._seconds(products)
    assert seconds.shape == (3,) and (seconds > 0).all()
    assert row_padding._alike(products).diagonal().all()

    agreed = row_padding.measured(runner.model, runner.vllm_config, lambda seconds: seconds_of(*EPYC))
    assert agreed.rows(2) == 4  # what the first rank found
    with monkeypatch.context() as patch:
        patch.setattr(type(runner.model_config), "is_moe", True)
        of_experts = row_padding.measured(runner.model, runner.vllm_config, lambda seconds: seconds_of(*EPYC))
    with monkeypatch.context() as patch:
        patch.setattr(runner.vllm_config, "lora_config", SimpleNamespace())
        of_adapters = row_padding.measured(runner.model, runner.vllm_config, lambda seconds: seconds_of(*EPYC))
    assert of_experts is NONE and of_adapters is NONE
    # Products of three rows round differently from those of one and two.
    apply = products[0].layer.quant_method.apply
    third = SimpleNamespace(apply=lambda layer, states: apply(layer, states) * (1 + (len(states) > 2) * 1e-6))
    monkeypatch.setattr(products[0].layer, "quant_method", third)
    alike = row_padding._alike(products)
    assert not alike[0, 2] and not alike[1, 2] and alike[2, 2]


@pytest.mark.engine
@pytest.mark.parametrize("case", ["batch_1", "mixed_lengths"])
@pytest.mark.parametrize("method", ["early", "exits", "cp", "dynamo"])
def test_padded_passes_say_the_same(
    method: str,
    case: str,
    engine: Callable[..., Any],
    alone: Callable[..., Any],
    fitted_heads: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that verify drafts and passes between steps run with rows of padding, steps without drafts as ever."""
    options: dict[str, Any] = {
        "early": {"method": "ppd", "num_speculative_tokens": 2},
        "exits": {"method": "ppd", "exit_layer": [2, 4], "gamma": 0.02, "num_speculative_tokens": 2},
        "cp": {"method": "cp", "num_speculative_tokens": 1},
        "dynamo": {"method": "dynamo"},
    }[method]
    llm = engine(options if options["method"] == "ppd" else {**options, "model": fitted_heads(method)})
    drafter, runner = drafter_of(llm), runner_of(llm)
    forward, seen = runner._model_forward, []

    def told(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((step_tokens(runner), runner.input_batch.num_reqs, len(input_ids)))
        return forward(input_ids, *args, **kwargs)

    monkeypatch.setattr(runner, "_model_forward", told)
    monkeypatch.setattr(drafter, "padding", RowPadding(seconds_of(4.0, 4.0, 4.0, 2.0, 3.0, 3.0, 1.0)))
    if hasattr(drafter, "passes"):
        monkeypatch.setattr(drafter.passes, "padding", drafter.padding)
    assert CASES[case](llm) == alone(case)
    padded = [rows > tokens for tokens, _, rows in seen]
    verified = [requests < tokens < 7 for tokens, requests, _ in seen]
    assert padded == verified and any(padded)
    assert {rows for (_, _, rows), of_more in zip(seen, padded, strict=True) if of_more} == {7}
