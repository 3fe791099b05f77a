# SPDX-License-Identifier: Apache-2.0
"""Results of older code than the current one, and the list of those that are accepted as such."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks.harness.results import stored
from vllm_ppd.benchmarks.harness.sources import BENCHMARKS, are_current, changed_since, files_of, folders_of

LIST = "outdated.json"
Outdated = dict[str, dict[str, dict[str, Any]]]  # by file and commit: contenders, and files that changed since


def outdated(folder: Path) -> Outdated:
    """Every contender in files of results whose code has changed since, apart from comments and docstrings."""
    by_file: Outdated = {}
    for path in results_in(folder):
        for commit, name, machine, identity in _measured(path):
            if not are_current(identity.get("sources")):
                of_commit = by_file.setdefault(path.stem, {}).setdefault(commit[:7], {"contenders": [], "changed": 0})
                if name not in of_commit["contenders"]:
                    of_commit["contenders"].append(name)
                    of_commit["changed"] = max(of_commit["changed"], _changed(path, commit, machine, identity))
    return by_file


def older_than_code(path: Path) -> bool:
    """Whether any contender of a file of results is outdated, or the file is empty."""
    identities = [identity for *_, identity in _measured(path)]
    return not identities or not all(are_current(identity.get("sources")) for identity in identities)


def known(folder: Path) -> Outdated:
    """The outdated contenders listed in outdated.json, which the page marks."""
    path = folder / LIST
    listed: Outdated = json.loads(path.read_text()) if path.exists() else {}
    return listed


def names(outdated: Outdated) -> set[tuple[str, str, str]]:
    """File, commit and contender of each."""
    return {
        (file, commit, name)
        for file, commits in outdated.items()
        for commit, of_commit in commits.items()
        for name in of_commit["contenders"]
    }


def note(path: Path, commits: dict[str, dict[str, Any]]) -> str:
    """The line about a file's outdated contenders, without names if all are."""
    everyone = {name for _, name, *_ in _measured(path)}
    return " ".join(
        f"**Older than the code**: measured at commit {commit}"
        + f" ({'; '.join(of_commit['contenders'])})" * (set(of_commit["contenders"]) < everyone)
        + f"; {of_commit['changed']} source files of what ran have changed since."
        for commit, of_commit in commits.items()
    )


def results_in(folder: Path) -> list[Path]:
    """The files of results of a folder."""
    return [path for path in sorted(folder.glob("*.json")) if path.name != LIST]


def _measured(path: Path) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Commit, contender, machine and identity of everything that the page shows from a file."""
    data = json.loads(path.read_text())
    if "runs" not in data:
        yield str(data.get("git")), "all", str(data.get("machine")), data
        return
    for measured in stored(path):
        for name in measured.contenders:
            for run in measured.runs_of(name):
                if any(turn["contender"] == name for turn in run["turns"]):
                    yield str(run["git"]), name, run["machine"], measured.contenders[name]


def _changed(path: Path, commit: str, machine: str, identity: dict[str, Any]) -> int:
    benchmark = json.loads(path.read_text()).get("benchmark")
    config = identity.get("speculative_config") or {}
    gpu = " core" not in machine
    return changed_since(commit, files_of(benchmark, folders_of(config), gpu)) if benchmark in BENCHMARKS else 0
