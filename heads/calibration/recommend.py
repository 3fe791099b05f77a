# SPDX-License-Identifier: Apache-2.0
"""Which setting of heads is recommended from what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_ppd.heads.config import CPConfig, DynaMoConfig, EarlyConfig, HeadsConfig


def recommend(config: HeadsConfig, parts: dict[str, Any]) -> dict[str, Any]:
    """The setting of the highest predicted speed-up on sampled texts, whose acceptance no loops flatter.

    Cost of a cycle in full passes at batch 1 (DESIGN's formula with the reads of the LM head, share h of a pass):
    early n ((1 - h) l/L + h) + 1; CP h + 1 (its states share one read);
    DynaMo (n - 1) ((1 - h) / L + h) + 1, n its token heads. With s of V tokens in the draft vocabulary h s/V is read.
    """
    share = parts["timing"]["lm_head_share"]
    best: dict[str, Any] = {"predicted_speedup": 0.0}
    if isinstance(config, EarlyConfig):
        (sampled,) = (by for name, by in parts["matches"]["acceptance"].items() if name != "greedy")
        depth = config.target.num_hidden_layers
        settings = [
            ({"default_exit_layers": [int(layer)], "num_speculative_tokens": n}, counts["length"],
             n * ((1 - share) * int(layer) / depth + share) + 1)
            for layer, by_n in sampled["Y"].items() for n, counts in enumerate(by_n, start=1)
        ]  # fmt: skip
    elif isinstance(config, CPConfig):
        settings = [
            ({"num_speculative_tokens": n, "draft_vocab_size": size}, counts["length"], 1 + share * part)
            for size, part, found in _by_vocabulary(config, parts)
            for n, counts in enumerate(found["by_drafts"], start=1)
        ]
    else:
        assert isinstance(config, DynaMoConfig)
        # The heads' layers run over every token, whether or not a token is drafted from them.
        layer = (1 - share) / config.target.num_hidden_layers
        settings = [
            ({"num_speculative_tokens": row["drafts_allowed"], "draft_vocab_size": size,
              "sampling": config.sampling.model_dump() | {"eps_b": row["eps_b"]}},
             1 + row["accepted"] / max(row["cycles"], 1), 1 + (config.tokens - 1) * (layer + share * part))
            for size, part, found in _by_vocabulary(config, parts) for row in found["rows"]
        ]  # fmt: skip
    for setting, length, cost in settings:
        if length / cost > best["predicted_speedup"]:
            best = {**setting, "acceptance_length": length, "cycle_in_passes": round(cost, 4)}
            best["predicted_speedup"] = round(length / cost, 4)
    return best


def _by_vocabulary(config: HeadsConfig, parts: dict[str, Any]) -> Iterator[tuple[int | None, float, dict[str, Any]]]:
    """(draft vocabulary, None for the whole; its share of the vocabulary; acceptance on sampled texts), whole first."""
    (sampled,) = (by for name, by in parts["acceptance"].items() if name != "greedy")
    yield None, 1.0, sampled
    for size, found in parts["vocabulary"].items():
        yield int(size), int(size) / config.target.vocab_size, found
