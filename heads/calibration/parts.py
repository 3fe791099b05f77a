# SPDX-License-Identifier: Apache-2.0
"""What the calibrations of several kinds of heads share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vllm_ppd.heads.calibration.replay import Drafted
from vllm_ppd.heads.calibration.run import Calibration
from vllm_ppd.heads.calibration.tables import percent, table
from vllm_ppd.heads.draft_vocabulary import candidate_sizes, covered, most_frequent


def timing(calibration: Calibration) -> dict[str, Any]:
    """Seconds of a layer and an LM head by batch size; h, the LM head's share of a pass; a d x d matrix in layers.

    What a transform costs is told by its weights: timed by itself it would be read from the processor's cache.
    """
    target = calibration.target
    weights = sum(parameter.numel() for parameter in target.layers[-1].parameters())
    return {
        "seconds": calibration.times,
        "lm_head_share": round(calibration.head_share, 4),
        "transform_in_layers": round(target.hidden_size**2 / weights, 4),
    }


def vocabularies(calibration: Calibration) -> list[tuple[torch.Tensor, float]]:
    """Draft vocabularies shorter than the whole, each with the share of the training text that it covers."""
    if calibration.config.counts_tensor is None:
        return []
    counts = calibration.tensors[calibration.config.counts_tensor]
    share, device = covered(counts), calibration.target.device
    own = calibration.config.draft_vocab_size  # which the heads may have been trained over
    sizes = {*candidate_sizes(len(counts)), *([own] if own is not None and own < len(counts) else [])}
    return [
        (most_frequent(counts, size).to(device), round(float(share[size - 1]), 4))
        for size in sorted(sizes, reverse=True)
    ]


def counts(drafted: Drafted) -> dict[str, float]:
    """What was drafted and accepted, with rate and length."""
    raw = {name: round(value, 2) for name, value in drafted._asdict().items()}
    return raw | {"rate": round(drafted.rate, 4), "length": round(drafted.length, 4)}


def vocabulary_tables(found: dict[str, Any]) -> Iterator[str]:
    """Accepted drafts by draft vocabulary, at the setting that accepts most."""
    if found:
        yield "Draft vocabularies, sampled texts (size, share of the training text, drafts accepted a step at best)"
        rows = []
        for size, by in found.items():
            best = max(c["accepted"] / c["cycles"] for c in by.get("by_drafts") or by["rows"])
            rows.append([size, percent(by["covers"]), f"{best:.3f}"])
        yield table(["tokens", "covers", "accepted a step"], rows)
