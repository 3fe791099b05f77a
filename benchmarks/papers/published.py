# SPDX-License-Identifier: Apache-2.0
"""What the papers print (published.json), beside which our tables put what was measured: a namespace a paper."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def _values(data: Any) -> Any:
    """JSON's keys as the numbers that they are, and lists as tuples."""
    if isinstance(data, dict):
        return {json.loads(key) if key.replace(".", "").isdigit() else key: _values(data[key]) for key in data}
    return tuple(map(_values, data)) if isinstance(data, list) else data


def _paper(name: str) -> Any:
    return SimpleNamespace(**{key: _values(table["values"]) for key, table in _ALL[name].items() if key != "about"})


_ALL = json.loads(Path(__file__).with_name("published.json").read_text())
CP, DYNAMO, PARADECODE, PPD = map(_paper, ("cp", "dynamo", "paradecode", "ppd"))


def rates_of(task: str) -> dict[tuple[int, int, str], tuple[float, ...]]:
    """PPD's match rates of a task by (layer, k, form): eight ranges of positions, then Total."""
    keys = [(layer, k, form) for layer in PPD.LAYERS for k in PPD.KS for form in PPD.FORMS]
    lines = PPD.BY_POSITION[task]
    return {key: tuple(x / 100 for x in line) for key, line in zip(keys, lines, strict=True)}
