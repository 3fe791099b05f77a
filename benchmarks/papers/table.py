# SPDX-License-Identifier: Apache-2.0
"""A table of a paper: our values beside the published ones, claims, and Markdown of all that.

tables.json holds what does not depend on a measurement: title, columns, number formats and the note.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.estimates import Estimate
from vllm_ppd.heads.in_words import table as markdown

HERE = Path(__file__).parent
VERDICTS = {True: "holds", False: "does not hold", None: "not decided"}
Value = float | str | None  # None: not measured, or not in the paper


class Missing(BenchError):
    """A table that cannot be measured with these options; the message is one line: what to give."""


@dataclass(frozen=True)
class Row:
    """A row of a table, or a point of a figure."""

    label: str  # as in the paper, or of our task
    ours: Sequence[Value] | None = None
    theirs: Sequence[Value] | None = None


@dataclass(frozen=True)
class Verdict:
    """What a measurement says of a claim of the paper."""

    claim: str
    holds: bool | None  # None: the measurement is too small to decide
    evidence: str


class PaperTable(BaseModel):
    """One table or figure.

    Raises:
        ValidationError: if a row has another number of values than there are columns.
    """

    model_config = ConfigDict(frozen=True)

    key: str  # "ppd-2", "paradecode-fig-6"
    paper: str
    title: str  # as the paper names it, with its number
    columns: tuple[str, ...]  # of the values, without the labels'
    rows: tuple[Row, ...]
    note: str  # how ours was measured, and what differs from the paper
    forms: tuple[str, ...] | str = "{:.3f}"  # of a column's numbers, or of all; shares are fractions
    settings: dict[str, Any] = Field(default_factory=dict)
    claims: tuple[Verdict, ...] = ()

    @model_validator(mode="after")
    def _rows_fit(self) -> Self:
        for row in self.rows:
            for values in (row.ours, row.theirs):
                if values is not None and len(values) != len(self.columns):
                    raise ValueError(f"{self.key}, {row.label}: {len(values)} values for {len(self.columns)} columns")
        return self


def published(paper: str) -> Any:
    """What a paper prints (published.json), beside which our tables put what was measured: a namespace."""
    tables = json.loads((HERE / "published.json").read_text())[paper]
    return SimpleNamespace(**{key: _values(table["values"]) for key, table in tables.items() if key != "about"})


def _values(data: Any) -> Any:
    """JSON's keys as the numbers that they are, and lists as tuples."""
    if isinstance(data, dict):
        return {json.loads(key) if key.replace(".", "").isdigit() else key: _values(data[key]) for key in data}
    return tuple(map(_values, data)) if isinstance(data, list) else data


def paper_table(
    key: str, rows: Iterable[Row], *, settings: dict[str, Any], claims: Iterable[Verdict] = (),
    columns: Sequence[str] = (), forms: Sequence[str] = (), **facts: Any,
) -> PaperTable:  # fmt: skip
    """The table of a key, with what tables.json says of it.

    Args:
        key: of tables.json.
        rows: those shorter than the columns are filled up with None.
        settings: of the measurement, to be shown.
        claims: the same one counts once.
        columns, forms: where they depend on the measurement.
        facts: for the placeholders of the note.
    """
    described = json.loads((HERE / "tables.json").read_text())
    about = described["tables"][key]
    columns = tuple(columns or about["columns"])

    def filled(values: Sequence[Value] | None) -> tuple[Value, ...] | None:
        return None if values is None else (*values, *[None] * (len(columns) - len(values)))

    return PaperTable(
        key=key, paper=about["paper"], title=about["title"], columns=columns, forms=tuple(forms) or about["forms"],
        rows=tuple(Row(row.label, filled(row.ours), filled(row.theirs)) for row in rows),
        note=" ".join(described["sentences"].get(sentence, sentence) for sentence in about["note"]).format(**facts),
        settings=settings, claims=tuple(dict.fromkeys(claims)),
    )  # fmt: skip


def rises(claim: str, where: str, difference: Estimate, form: str = "{:+.3f}") -> Verdict:
    """The verdict on a claim that a difference is above 0."""
    return Verdict(claim, difference.above(), f"{where}: {difference.text(form)}")


def render(table: PaperTable) -> str:
    """Markdown: a heading, the rows with ours above theirs, the note and the claims."""
    forms = [table.forms] * len(table.columns) if isinstance(table.forms, str) else table.forms
    lines = []
    for row in table.rows:
        both = list(zip(row.ours or (), row.theirs or (), strict=False))
        if both and all(None in values for values in both):  # separate columns: one line has room for both
            merged = [theirs if ours is None else ours for ours, theirs in both]
            lines.append([row.label, "both", *_cells(merged, forms)])
            continue
        label = row.label
        for whose, values in (("ours", row.ours), ("paper", row.theirs)):
            if values is not None:
                lines.append([label, whose, *_cells(values, forms)])
                label = ""
    settings = ", ".join(f"{name} {value}" for name, value in table.settings.items())
    blocks = [
        f"### {table.paper}, {table.title} (`{table.key}`)",
        markdown(["", "", *table.columns], lines),
        table.note + (f" Settings: {settings}." * bool(settings)),
        "\n".join(f"- {claim.claim}: {VERDICTS[claim.holds]} ({claim.evidence})." for claim in table.claims),
    ]
    return "\n\n".join(filter(None, blocks))


def _cells(values: Sequence[Value], forms: Sequence[str]) -> list[str]:
    return [
        "-" if value is None else value if isinstance(value, str) else form.format(value)
        for value, form in zip(values, forms, strict=True)
    ]


def read_tables(path: Path) -> list[dict[str, Any]]:
    """The entries of a file of tables: each a PaperTable with its provenance and identity, the last of a table counts.

    Raises:
        BenchError: if the file holds something else.
    """
    try:
        data = json.loads(path.read_text())
        if data["benchmark"] == "tables":
            return list(data["tables"])
    except (ValueError, KeyError, TypeError):
        pass
    raise BenchError(f"{path} is no file of tables; give another --out")


def newest(path: Path) -> list[PaperTable]:
    """The newest of each table in a file."""
    return [PaperTable.model_validate(entry) for entry in {entry["key"]: entry for entry in read_tables(path)}.values()]


def claims(files: Iterable[Path]) -> str:
    """Markdown: what the newest of each table says of the paper's claims, a section a model."""
    by_model: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for path in files:
        entries = {(entry["key"], entry["identity"]["model"]): entry for entry in read_tables(path)}
        for (key, model), entry in entries.items():
            table = PaperTable.model_validate(entry)
            for claim in table.claims:
                row = table.paper, f"`{key}`", claim.claim, VERDICTS[claim.holds]
                by_model.setdefault(model, {}).setdefault(row, []).append(claim.evidence)
    header = ["paper", "table", "claim", "here", "measured"]
    return "\n\n".join(
        f"## The papers' claims on `{model}`\n\n"
        + markdown(header, [[*row, "; ".join(evidence)] for row, evidence in rows.items()])
        for model, rows in by_model.items()
    )
