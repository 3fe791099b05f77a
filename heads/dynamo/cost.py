# SPDX-License-Identifier: Apache-2.0
"""What drafting with DynaMo's token heads costs, by back-off threshold, drafts, draft vocabulary and mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_ppd.heads.calibration.setting import Setting, by_vocabulary
from vllm_ppd.heads.dynamo.config import DynaMoConfig


def settings(config: DynaMoConfig, parts: dict[str, Any], greedy: bool) -> Iterator[Setting]:
    """n - 1 layers, which run over every token, and as many reads of the LM head or of the draft vocabulary's share."""
    heads = config.tokens - 1
    measured = list(by_vocabulary(config, parts, greedy))
    if not greedy:
        measured += [(None, 1.0, found) for found in parts.get("mask", {}).values()]
    for size, share, found in measured:
        for row in found["rows"]:
            cycles, n = max(row["cycles"], 1), row["drafts_allowed"]
            alpha = row.get("alpha_c", config.sampling.alpha_c)  # earlier calibrations knew one power alone
            sampling = config.sampling.model_dump() | {"eps_b": row["eps_b"], "alpha_c": alpha}
            options = {"num_speculative_tokens": n, "draft_vocab_size": size, "sampling": sampling}
            length = 1 + row["accepted"] / cycles
            yield Setting(options, n, row["drafted"] / cycles, length, heads, heads * share)
