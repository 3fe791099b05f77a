# SPDX-License-Identifier: Apache-2.0
"""What early drafting with each exit and number of drafts costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_ppd.heads.calibration.setting import Setting, on_texts
from vllm_ppd.heads.early.config import EarlyConfig


def settings(config: EarlyConfig, parts: dict[str, Any], greedy: bool) -> Iterator[Setting]:
    """n drafts at layer l add n l layers and n reads of the LM head, beside the pass; each reads a transform, too."""
    transform = parts["timing"].get("transform_in_layers", 0.0)
    for form, by_layer in on_texts(parts["matches"]["acceptance"], greedy).items():
        own = transform if form == "Y" and config.head == "transform" else 0.0
        for layer, by_n in by_layer.items():
            for n, counts in enumerate(by_n, start=1):
                options = {"default_exit_layers": [int(layer)], "num_speculative_tokens": n}
                drafted = counts["drafted"] / max(counts["cycles"], 1)
                layers = n * (int(layer) + own)
                yield Setting(
                    options, n, drafted, counts["length"], layers, n, exit_layer=int(layer), trained=form == "Y"
                )
