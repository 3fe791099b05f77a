# SPDX-License-Identifier: Apache-2.0
"""Files of results: runs with every turn, and where each was measured."""

import json
from pathlib import Path
from typing import Any

from vllm_ppd.heads.errors import UserError
from vllm_ppd.heads.files import write_json
from vllm_ppd.heads.provenance import provenance

BASE = "vLLM"  # the system without speculation, to which others are compared
CONTROL = "vLLM, again"  # a second engine of it, which shows the noise
Batch = list[list[int]]  # token IDs of requests
Run = dict[str, Any]
Turn = dict[str, Any]
# What a continued run shares
SAME = ("options", "contenders", "versions", "machine", "git")


class BenchError(UserError):
    """Bad input of a benchmark, or an engine that fails."""


def turns_of(run: Run, **place: Any) -> list[Turn]:
    """The turns of a run with these values, such as those of a contender."""
    return [turn for turn in run["turns"] if place.items() <= turn.items()]


class Results:
    """A file of results that is being measured."""

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one.

        Raises:
            BenchError: if it is something else.
        """
        self.path = path
        self.data: dict[str, Any] = {"runs": []}
        if path.exists():
            try:
                self.data["runs"] = json.loads(path.read_text())["runs"]
            except (ValueError, KeyError, TypeError):
                raise BenchError(
                    f"{path} is not a file of results; use another --out"
                ) from None

    def run_of(self, options: dict[str, Any], contenders: dict[str, Any]) -> Run:
        """The run with these options and systems on this machine: a stopped one, or a new one."""
        facts = provenance(
            options=options, contenders=contenders, failures={}, turns=[]
        )
        run: Run = json.loads(json.dumps(facts))
        for earlier in self.data["runs"]:
            if all(earlier.get(name) == run[name] for name in SAME):
                return earlier
        self.data["runs"].append(run)
        return run

    def write(self) -> None:
        write_json(self.path, self.data)
