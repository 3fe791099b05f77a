# SPDX-License-Identifier: Apache-2.0
"""The papers' tables and figures on a given model and data, beside the published values: `ppd bench tables`.

options.py -> run.py (which tables, and what is kept) -> context.py (model, tasks, texts, heads, engines, made once)
-> ppd.py, paradecode.py, cp.py, dynamo.py (a function a table; published.json holds what they print) -> render.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_ppd.benchmarks import BenchError

if TYPE_CHECKING:
    from vllm_ppd.benchmarks.papers.context import Context

VERDICTS = {True: "holds", False: "does not hold", None: "not decided"}
Value = float | str | None  # None: not measured, or not in the paper


class Missing(BenchError):
    """A table that cannot be measured with what was given; the message is one line: what to give."""


class Row(NamedTuple):
    """A row of a table, or a point of a figure."""

    label: str  # as in the paper, or of our task
    ours: Sequence[Value] | None
    theirs: Sequence[Value] | None = None


class Curve(NamedTuple):
    """A curve of a figure."""

    label: str
    ours: Sequence[tuple[float, float]] | None
    theirs: Sequence[tuple[float, float]] | None = None


class Verdict(NamedTuple):
    """What a measurement says of a claim of the paper."""

    claim: str
    holds: bool | None  # None: the measurement is too small to decide
    evidence: str


@dataclass(frozen=True)
class PaperTable:
    """One table or figure.

    Raises:
        ValueError: if a row has another number of values than there are columns.
    """

    key: str  # "ppd-2", "paradecode-fig-6"
    paper: str
    title: str  # as the paper names it, with its number
    columns: tuple[str, ...]  # of the values, without the labels'
    rows: tuple[Row, ...]
    note: str  # how ours was measured, and what differs from the paper
    forms: tuple[str, ...] | str = "{:.3f}"  # of a column's numbers, or of all; shares are kept as fractions
    settings: dict[str, Any] = field(default_factory=dict)
    axes: tuple[str, str] | None = None  # x and y of a figure
    curves: tuple[Curve, ...] = ()
    claims: tuple[Verdict, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            for values in (row.ours, row.theirs):
                if values is not None and len(values) != len(self.columns):
                    raise ValueError(f"{self.key}, {row.label}: {len(values)} values for {len(self.columns)} columns")

    def to_json(self) -> dict[str, Any]:
        """As it is kept: rows and curves as objects."""
        data = asdict(self)
        data["rows"] = [row._asdict() for row in self.rows]
        data["curves"] = [curve._asdict() for curve in self.curves]
        data["claims"] = [claim._asdict() for claim in self.claims]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PaperTable:
        """From what was kept; further keys are ignored."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        known["rows"] = tuple(Row(**row) for row in data["rows"])
        known["curves"] = tuple(Curve(**curve) for curve in data.get("curves", ()))
        known["claims"] = tuple(Verdict(**claim) for claim in data.get("claims", ()))
        return cls(**known)


Measure = Callable[["Context"], PaperTable]
