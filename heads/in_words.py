# SPDX-License-Identifier: Apache-2.0
"""Stored values for people: what `ppd inspect`, `calibrate` and `train` print, and model cards show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ppd.heads.layout import LARGEST_BATCH

RANGES = "num_speculative_tokens_per_batch_size"


def in_words(value: Any) -> str:
    """A JSON value on one line without its brackets: lists with commas, objects as `name: value`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {setting_in_words(name, part)}" for name, part in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(in_words, value)) or "none"
    return str(value)


def setting_in_words(name: Any, value: Any) -> str:
    """The value of a heads configuration's field."""
    if name == "calibration" and value is not None:
        return f"drafts on {value['device']}: {drafts_in_words(value[RANGES])}"
    return "the whole vocabulary" if name == "draft_vocab_size" and value is None else in_words(value)


def drafts_in_words(ranges: Sequence[Sequence[int]]) -> str:
    """[first batch size, last one, drafts] of each range."""
    return ", ".join(f"{drafts or 'none'} at {_sizes(first, last)}" for first, last, drafts in ranges)


def _sizes(first: int, last: int) -> str:
    if last >= LARGEST_BATCH:
        return "any number of requests" if first == 1 else f"{first} or more requests"
    if first == last:
        return f"{first} request{'s' if first > 1 else ''}"
    return f"{first} to {last} requests"
