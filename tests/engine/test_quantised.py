# SPDX-License-Identifier: Apache-2.0
"""Quantised targets: greedy output is the quantised target's own, with early drafting and CP heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import overfitted
import pytest
import quantised
from cases import CASES
from conftest import start_engine

pytestmark = pytest.mark.engine

METHODS: dict[str, dict[str, Any]] = {
    "early": {"method": "ppd", "exit_layer": 4},
    "cp": {"method": "cp", "heads": {"rank": 3, "condition": "chain"}},
}


@pytest.fixture(scope="module")
def started(
    tiny_model: Callable[..., Path],
    fitted_heads: Callable[..., str],
    made_once: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Any]:
    """started(method): an engine; its heads were fitted to the model before it was quantised."""
    engines: dict[str | None, Any] = {}

    def get(method: str | None = None) -> Any:
        if method in engines:
            return engines[method]
        target = made_once("quantised", lambda folder: quantised.quantise(tiny_model(), folder))
        options = None if method is None else dict(METHODS[method])
        how = None if options is None else options.pop("heads", None)
        if options is not None and how is not None:
            heads = fitted_heads(options["method"], **how)
            options["model"] = str(overfitted.moved(heads, target, tmp_path_factory.mktemp("heads")))
        engines[method] = start_engine(target, options)
        return engines[method]

    return get


@pytest.mark.parametrize("method", METHODS)
def test_same_tokens(started: Callable[..., Any], method: str) -> None:
    llm = started(method)
    for case in ("batch_16", "arrivals_and_aborts"):
        assert CASES[case](llm) == CASES[case](started())
    assert llm.counts["accepted"] > 0
