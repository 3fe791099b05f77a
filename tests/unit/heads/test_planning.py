# SPDX-License-Identifier: Apache-2.0
"""The recommended setting against brute force, and PPD's Theorem 4.1 against simulation."""

from typing import Any

import numpy as np
import pytest

from vllm_ppd.heads.base import TargetLayers
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.planning import advice, recommend, theorem_4_1

LAYERS = 10
SHARE = 0.2
TRANSFORM = 0.1
TARGET = TargetLayers(
    model_type="llama", hidden_size=8, vocab_size=320, num_hidden_layers=LAYERS
)
TIMING = {"lm_head_share": SHARE, "transform_in_layers": TRANSFORM}


def counts(accepted: float, drafts: int) -> list[dict[str, float]]:
    """Counts with 1, 2, ... drafts, each accepted with a probability if those before it were."""
    return [
        {
            "cycles": 1,
            "drafted": n,
            "length": sum(accepted**i for i in range(n + 1)),
        }
        for n in range(1, drafts + 1)
    ]


@pytest.mark.parametrize(
    "rates", [{2: 0.2, 5: 0.9}, {2: 0.85, 5: 0.9}, {2: 0.05, 5: 0.1}]
)
def test_the_best_exit_and_drafts_by_brute_force(rates: dict[int, float]) -> None:
    config = EarlyConfig(
        verifier="m", target=TARGET, exit_layers=[2, 5], num_speculative_tokens=1
    )
    acceptance = {"Y": {layer: counts(rate, 4) for layer, rate in rates.items()}}
    matches = {
        "layers": [2, 5],
        "match": {},
        "acceptance": {"greedy": acceptance, "T 0.8": acceptance},
    }
    parts = {"timing": TIMING, "matches": matches}
    chosen = recommend(config, config.parts.model_validate(parts))
    settings = []
    for layer, rate in rates.items():
        for n in range(1, 5):
            tokens = sum(rate**i for i in range(n + 1))
            passes = 1 + n * ((layer + TRANSFORM) * (1 - SHARE) / LAYERS + SHARE)
            settings.append((tokens / passes, layer, n))
    speedup, layer, n = max(settings)
    assert chosen["predicted_speedup"] == pytest.approx(speedup, abs=1e-4)
    # The engine chooses between the best exit and those beside it.
    assert chosen["default_exit_layers"] == [layer, 7 - layer]
    assert chosen["num_speculative_tokens"] == n
    said = advice("heads", "the model", chosen)
    serve = "vllm serve 'the model' --speculative-model heads"
    assert (serve if speedup > 1 else "gain on this text: none") in said


@pytest.mark.parametrize(
    ("accepted_short", "expected"), [(0.69, 32), (0.4, None)]
)
@pytest.mark.parametrize("kind", [CPConfig, EarlyConfig])
def test_a_draft_vocabulary_is_chosen_where_it_pays(
    kind: Any, accepted_short: float, expected: int | None
) -> None:
    of_kind: dict[str, Any] = {"exit_layers": [2]}
    if kind is CPConfig:
        of_kind = {"positions": 2, "rank": 1}
    config = kind(
        verifier="m",
        target=TARGET,
        num_speculative_tokens=1,
        token_counts=True,
        **of_kind,
    )
    whole: Any = {"by_drafts": counts(0.7, 1)}
    short: Any = {"by_drafts": counts(accepted_short, 1)}
    if kind is EarlyConfig:
        whole = {"Y": {2: counts(0.7, 1)}}
        short = {2: counts(accepted_short, 1)}
    measured = {
        "acceptance": {"greedy": whole, "T 0.8": whole},
        "vocabulary": {32: short},
    }
    parts: dict[str, Any] = {"timing": TIMING, **measured}
    if kind is EarlyConfig:
        matches = {"layers": [2], "match": {}, **measured}
        parts = {"timing": TIMING, "matches": matches}
    chosen = recommend(config, config.parts.model_validate(parts))
    assert chosen["draft_vocab_size"] == expected


@pytest.mark.parametrize(
    ("split", "candidates", "rate"), [(6, 1, 0.6), (5, 3, 0.9), (8, 5, 0.0)]
)
def test_theorem_4_1_by_the_runs_of_its_proof(
    split: int, candidates: int, rate: float
) -> None:
    """A run of x tokens takes d + (x - 1) d_bar; a miss begins a new run; candidates
    add k (d - d_bar) a token.
    """
    tokens = 11
    rounds = 20_000
    hits = np.random.default_rng(0).binomial(tokens - 1, rate, rounds)
    latency = split * tokens + (LAYERS - split) * (tokens - hits.mean())
    expected = theorem_4_1(
        LAYERS,
        split,
        candidates,
        rate,
        tokens,
    )
    assert expected.latency == pytest.approx(latency / tokens, rel=0.01)
    further = candidates * (LAYERS - split)
    assert expected.compute == pytest.approx(expected.latency + further)
