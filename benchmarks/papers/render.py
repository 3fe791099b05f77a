# SPDX-License-Identifier: Apache-2.0
"""Markdown of tables: our line above theirs."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ppd.benchmarks.papers import VERDICTS, PaperTable, Value
from vllm_ppd.heads.calibration.tables import table as markdown


def render(table: PaperTable) -> str:
    """A heading, the rows, and the note."""
    forms = [table.forms] * len(table.columns) if isinstance(table.forms, str) else table.forms
    lines = []
    for row in table.rows:
        pairs = list(zip(row.ours or (), row.theirs or (), strict=False))
        if pairs and all(None in pair for pair in pairs):  # columns of their own: one line has room for both
            one = [theirs if ours is None else ours for ours, theirs in pairs]
            lines.append([row.label, "both", *_cells(one, forms)])
            continue
        label = row.label
        for whose, values in (("ours", row.ours), ("paper", row.theirs)):
            if values is not None:
                lines.append([label, whose, *_cells(values, forms)])
                label = ""
    body = markdown(["", "", *table.columns], lines)
    settings = ", ".join(f"{name} {value}" for name, value in table.settings.items())
    return "\n\n".join(
        [
            f"### {table.paper}, {table.title} (`{table.key}`)",
            body,
            table.note + (f" Settings: {settings}." * bool(settings)),
            *(["\n".join(f"- {one.claim}: {VERDICTS[one.holds]} ({one.evidence})." for one in table.claims)]
              if table.claims else []),
        ]
    )  # fmt: skip


def _cells(values: Sequence[Value], forms: Sequence[str]) -> list[str]:
    return [
        "-" if value is None else value if isinstance(value, str) else form.format(value)
        for value, form in zip(values, forms, strict=True)
    ]
