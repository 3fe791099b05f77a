# SPDX-License-Identifier: Apache-2.0
"""A calibration as tables like the papers'."""

from __future__ import annotations

from typing import Any

from vllm_ppd.heads.calibration.tables import table
from vllm_ppd.heads.registry import HEADS


def report(result: dict[str, Any]) -> str:
    """Markdown: every part's tables, then the recommendation."""
    parts, blocks = result["parts"], [f"{result['kind']} heads for {result['target']}; {result['machine']}"]
    blocks += [*HEADS[result["kind"]].tables(parts, result["options"]), _timing(parts["timing"])]
    chosen = result["recommendation"]
    settings = {k: v for k, v in chosen.items() if k not in ("predicted_speedup", "acceptance_length")}
    blocks.append(
        f"Recommended (sampled texts, batch 1): {settings}; acceptance length {chosen.get('acceptance_length')}, "
        f"predicted speed-up {chosen['predicted_speedup']}x"
        + ("" if chosen["predicted_speedup"] > 1 else ": no setting of these heads gains on this text")
    )
    return "\n\n".join(blocks)


def _timing(found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    rows = [[name, *(f"{1e3 * value:.3f}" for value in by.values())] for name, by in seconds.items()]
    title = "Milliseconds by batch size (transformers, eager; a server has its own)"
    return f"{title}\n\n" + table(["", *next(iter(seconds.values()))], rows)
