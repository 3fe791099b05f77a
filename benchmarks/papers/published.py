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


def _paper(tables: dict[str, Any]) -> Any:
    return SimpleNamespace(**{key: _values(table["values"]) for key, table in tables.items() if key != "about"})


_ALL = json.loads(Path(__file__).with_name("published.json").read_text())
CP, DYNAMO, PARADECODE, PPD = (_paper(_ALL[name]) for name in ("cp", "dynamo", "paradecode", "ppd"))
