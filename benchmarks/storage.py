# SPDX-License-Identifier: Apache-2.0
"""Files of results: runs with every turn, and where each was measured."""

import json
import subprocess
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.training import provenance as heads_provenance

Run = dict[str, Any]
Turn = dict[str, Any]
# What a continued run shares
SAME = (
    "options",
    "contenders",
    "versions",
    "machine",
    "git",
)


def provenance() -> dict[str, Any]:
    """As of heads, but the commit says whether the checkout has changes."""
    return heads_provenance.provenance(git=commit())


def commit() -> str | None:
    """The commit of a checkout, with -dirty after changes; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def write_json(path: Path, data: Any) -> None:
    """Write a file as a whole: a process that is killed leaves the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(data, indent=1) + "\n")


def read_runs(path: Path) -> list[Run]:
    """The runs in a file of results.

    Raises:
        BenchError: if it is something else.
    """
    try:
        runs: list[Run] = json.loads(path.read_text())["runs"]
    except (ValueError, KeyError, TypeError):
        raise BenchError(
            f"{path} is not a file of results; give another --out"
        ) from None
    return runs


class Results:
    """A file of results that is being measured."""

    def __init__(self, path: Path, benchmark: str) -> None:
        self.path = path
        self.data: dict[str, Any] = {"benchmark": benchmark, "runs": []}
        if path.exists():
            self.data["runs"] = read_runs(path)

    def run_of(self, options: dict[str, Any], contenders: dict[str, Any]) -> Run:
        """The run with these options and systems on this machine: a stopped one, or a new one."""
        facts = {**provenance(), "options": options, "contenders": contenders}
        run: Run = json.loads(json.dumps({**facts, "failures": {}, "turns": []}))
        for earlier in self.data["runs"]:
            if all(earlier.get(name) == run[name] for name in SAME):
                return earlier
        self.data["runs"].append(run)
        return run

    def write(self) -> None:
        write_json(self.path, self.data)
