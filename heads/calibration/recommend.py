# SPDX-License-Identifier: Apache-2.0
"""Which setting of heads is recommended from what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm_ppd.heads.config import CPConfig, DynaMoConfig, EarlyConfig, HeadsConfig


class Setting(NamedTuple):
    """One way of drafting with heads, what it costs, and how much of it is accepted."""

    options: dict[str, Any]  # fields of the heads' configuration
    drafts: int  # most drafts a cycle, n
    drafted: float  # drafts a cycle, on average
    length: float  # tokens a cycle
    layers: float  # decoder layers that drafting adds to a pass, the heads' own d x d transforms among them
    reads: float  # reads of the whole LM head that it adds
    rows: int = 1  # hidden states of a request in each such read
    exit_layer: int | None = None  # where early drafts are read
    trained: bool = True  # whether by heads

    def cycle(self, num_layers: int, head_share: float) -> float:
        """Cost of a cycle in full passes at batch 1, where memory bandwidth is the limit; h is the LM head's share."""
        return 1 + self.layers * (1 - head_share) / num_layers + head_share * self.reads


def recommend(config: HeadsConfig, parts: dict[str, Any]) -> dict[str, Any]:
    """The setting of the highest predicted speed-up on sampled texts, whose acceptance no loops flatter."""
    share = parts["timing"]["lm_head_share"]
    best: dict[str, Any] = {"predicted_speedup": 0.0}
    for setting in settings(config, parts):
        if not setting.trained:
            continue
        cost = setting.cycle(config.target.num_hidden_layers, share)
        if setting.length / cost > best["predicted_speedup"]:
            best = {**setting.options, "acceptance_length": setting.length, "cycle_in_passes": round(cost, 4)}
            best["predicted_speedup"] = round(setting.length / cost, 4)
    return best


def settings(config: HeadsConfig, parts: dict[str, Any], greedy: bool = False) -> Iterator[Setting]:
    """Every setting that was measured, on sampled or on greedy texts.

    n early drafts at layer l add n l layers and n reads of the LM head, beside the pass; a CP head adds one read, which
    all its states share; DynaMo's n token heads add n - 1 layers, which run over every token, and as many reads. Of s
    tokens in the draft vocabulary that share of the LM head is read. A transform is read for each early draft, and for
    each expert and position of a CP head.
    """
    transform = parts["timing"].get("transform_in_layers", 0.0)
    if isinstance(config, EarlyConfig):
        for form, by_layer in _of(parts["matches"]["acceptance"], greedy).items():
            own = transform if form == "Y" and config.head == "transform" else 0.0
            for layer, by_n in by_layer.items():
                for n, counts in enumerate(by_n, start=1):
                    options = {"default_exit_layers": [int(layer)], "num_speculative_tokens": n}
                    drafted = counts["drafted"] / max(counts["cycles"], 1)
                    layers = n * (int(layer) + own)
                    yield Setting(
                        options, n, drafted, counts["length"], layers, n, exit_layer=int(layer), trained=form == "Y"
                    )
    elif isinstance(config, CPConfig):
        for size, part, found in _by_vocabulary(config, parts, greedy):
            for n, counts in enumerate(found["by_drafts"], start=1):
                options = {"num_speculative_tokens": n, "draft_vocab_size": size}
                drafted = counts["drafted"] / max(counts["cycles"], 1)
                states = config.rank * (n + 1)
                layers = states * transform if config.factorised else 0.0
                yield Setting(options, n, drafted, counts["length"], layers, part, rows=states)
    else:
        assert isinstance(config, DynaMoConfig)
        heads = config.tokens - 1
        for size, part, found in _by_vocabulary(config, parts, greedy):
            for row in found["rows"]:
                cycles, n = max(row["cycles"], 1), row["drafts_allowed"]
                options = {
                    "num_speculative_tokens": n, "draft_vocab_size": size,
                    "sampling": config.sampling.model_dump() | {"eps_b": row["eps_b"]},
                }  # fmt: skip
                length = 1 + row["accepted"] / cycles
                yield Setting(options, n, row["drafted"] / cycles, length, heads, heads * part)


def _of(by_texts: dict[str, Any], greedy: bool) -> Any:
    """What was measured on greedy texts, or on the sampled ones."""
    (name,) = (name for name in by_texts if (name == "greedy") == greedy)
    return by_texts[name]


def _by_vocabulary(
    config: HeadsConfig, parts: dict[str, Any], greedy: bool
) -> Iterator[tuple[int | None, float, dict[str, Any]]]:
    """(draft vocabulary, None for the whole; its share of the vocabulary; acceptance), whole first.

    Shorter ones are measured on sampled texts only.
    """
    yield None, 1.0, _of(parts["acceptance"], greedy)
    if not greedy:
        for size, found in parts.get("vocabulary", {}).items():
            yield int(size), int(size) / config.target.vocab_size, found
