# SPDX-License-Identifier: Apache-2.0
"""Readable forms of stored values: words on a line, and Markdown tables that also read well in a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_ppd.heads.base import LARGEST_BATCH
from vllm_ppd.heads.measured import Counts

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
        return ", ".join(f"{name}: {setting_in_words(name, content)}" for name, content in value.items()) or "none"
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


def table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with columns padded to their widest cell; numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(_is_number(row[i]) for row in cells[1:]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    rule = [("-" * (width - 1) + ":" if right else "-" * width) for width, right in zip(widths, numeric, strict=True)]
    return "\n".join([line(cells[0]), "| " + " | ".join(rule) + " |", *map(line, cells[1:])])


def percent(value: float) -> str:
    return f"{100 * value:.2f}%"


def vocabulary_table(measured: Mapping[int, tuple[float, Sequence[Counts]]]) -> Iterator[str]:
    """Accepted drafts by draft vocabulary, at the setting that accepts most; empty if none was measured.

    Args:
        measured: by size, the share of the training text that it covers, and what each setting counted.
    """
    if measured:
        yield "Draft vocabularies, sampled texts (size, share of the training text, most drafts accepted per step)"
        rows = [
            [size, percent(covers), f"{max(c.accepted / c.cycles for c in counts):.3f}"]
            for size, (covers, counts) in measured.items()
        ]
        yield table(["tokens", "covers", "accepted per step"], rows)


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip("%x") or "0")
    except ValueError:
        return text in ("", "-")
    return True
