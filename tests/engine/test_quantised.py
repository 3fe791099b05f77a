# SPDX-License-Identifier: Apache-2.0
"""Quantised targets: greedy output is the quantised target's own, and drafts are accepted, with every method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import overfitted
import pytest
import quantised
import torch
from cases import CASES
from conftest import drafter_of, start_engine
from safetensors.torch import load_file

pytestmark = pytest.mark.engine

METHODS: dict[str, dict[str, Any]] = {
    "early": {"method": "ppd", "exit_layer": 4},
    "cp": {"method": "cp", "heads": {"rank": 3, "condition": "chain"}},
    "cp-short": {"method": "cp", "draft_vocab_size": 100, "heads": {"rank": 3, "condition": "chain"}},
    "dynamo": {"method": "dynamo", "eps_b": 0.1, "heads": {}},
}
QUICK = {("w8a8", "early"), ("w8a8", "cp"), ("w8a8", "dynamo")}
# vLLM's kernels of 4 bits take 16-bit activations alone.
DTYPE = {"awq": "bfloat16", "gptq": "bfloat16", "gptq-head": "bfloat16"}
FOUR_BITS = [
    ("awq", "early"),
    ("awq", "cp-short"),
    ("gptq", "early"),
    ("gptq", "cp-short"),
    ("gptq", "dynamo"),
    ("gptq-head", "cp-short"),
]
EIGHT_BITS = [(kind, method) for kind in ("w8a8", "w8a8-head") for method in METHODS]
CHOSEN = [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.full]) for case in [*EIGHT_BITS, *FOUR_BITS]]


@pytest.fixture(scope="module")
def started(
    tiny_model: Callable[..., Path],
    fitted_heads: Callable[..., str],
    made_once: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Any]:
    """started(format, method): an engine; its heads were fitted to the model before it was quantised."""
    engines: dict[tuple[str, str | None], Any] = {}

    def get(kind: str, method: str | None = None) -> Any:
        if (kind, method) in engines:
            return engines[kind, method]
        target = made_once(f"quantised-{kind}", lambda folder: quantised.quantise(tiny_model(), folder, kind))
        options = None if method is None else dict(METHODS[method])
        how = None if options is None else options.pop("heads", None)
        if options is not None and how is not None:
            heads = fitted_heads(options["method"], **how)
            options["model"] = str(overfitted.moved(heads, target, tmp_path_factory.mktemp("heads")))
        engines[kind, method] = start_engine(target, options, dtype=DTYPE.get(kind, "float32"))
        return engines[kind, method]

    return get


@pytest.mark.parametrize(("kind", "method"), CHOSEN)
def test_same_tokens(started: Callable[..., Any], kind: str, method: str) -> None:
    llm = started(kind, method)
    for case in ("batch_16", "arrivals_and_aborts"):
        assert CASES[case](llm) == CASES[case](started(kind))
    assert llm.counts["accepted"] > 0


@pytest.mark.full
def test_quantised_lm_head_is_read_as_vllm_computes_it(
    started: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    """The whole of it by vLLM's own product, a draft vocabulary by the dequantised rows."""
    target = drafter_of(started("w8a8-head", "cp-short")).target
    assert target.lm_head.plain() is None, "no kernel of ours reads quantised weights"
    weight = load_file(tiny_model() / "model.safetensors")["lm_head.weight"]
    written = quantised.w8a8("lm_head", weight)
    ids = torch.arange(50)
    rows, bias = target.lm_head_rows(ids)
    expected = (written["lm_head.weight"].float() * written["lm_head.weight_scale"])[ids]
    assert not torch.equal(expected, weight[ids])
    torch.testing.assert_close(rows, expected)
    assert not bias.any()
