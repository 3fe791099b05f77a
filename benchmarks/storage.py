# SPDX-License-Identifier: Apache-2.0
"""Files of results: runs with every turn, and where each was measured."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks import BenchError

Run = dict[str, Any]
Turn = dict[str, Any]
PACKAGES = ("vllm-ppd", "vllm", "torch", "transformers", "safetensors", "pydantic")
# What a continued run shares
SAME = (
    "options",
    "contenders",
    "versions",
    "machine",
    "git",
)


def provenance() -> dict[str, Any]:
    """Command, time, commit, versions and machine."""
    import torch

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    else:
        machine = f"{len(os.sched_getaffinity(0))} cores, {processor()}"
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git": commit(),
        "versions": versions,
        "machine": machine,
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


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
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(unfinished, path)


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
