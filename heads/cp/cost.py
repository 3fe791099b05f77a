# SPDX-License-Identifier: Apache-2.0
"""What drafting with a CP head costs, by number of drafts and draft vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_ppd.heads.calibration.setting import Setting, by_vocabulary
from vllm_ppd.heads.cp.config import CPConfig


def settings(config: CPConfig, parts: dict[str, Any], greedy: bool) -> Iterator[Setting]:
    """One read of the LM head, which all states share, or that share of it which the draft vocabulary is.

    A transform is read for each expert and position that it predicts. A condition saves the first position's, and adds
    a matrix of that size a draft, which all experts share; chain one more a draft but the first, and a read of the
    draft vocabulary for each draft in place of one for all.
    """
    transform = parts["timing"].get("transform_in_layers", 0.0)
    lead, chain = config.positions - config.factors, config.condition == "chain"
    for size, share, found in by_vocabulary(config, parts, greedy):
        for n, counts in enumerate(found["by_drafts"], start=1):
            options = {"num_speculative_tokens": n, "draft_vocab_size": size}
            drafted = counts["drafted"] / max(counts["cycles"], 1)
            states = config.rank * (n + 1 - lead)
            matrices = states + n * lead + (n - 1) * chain
            layers = matrices * transform if config.factorised else 0.0
            reads, rows = (n * share, config.rank) if chain else (share, states)
            yield Setting(options, n, drafted, counts["length"], layers, reads, rows=rows)
