# SPDX-License-Identifier: Apache-2.0
"""Measure and check the results on the results page, part by part, on a machine without a GPU.

    python -m vllm_ppd.benchmarks.evidence --data FOLDER            # all parts; or make evidence ARGS='--data FOLDER'
    python -m vllm_ppd.benchmarks.evidence --data FOLDER --only group serve

FOLDER has spec_bench.jsonl: questions of Spec-Bench (384 in the stored results), one per line, as chats with a
`category`. A part is measured in build/evidence, where a stopped part continues, and becomes a result once it is
complete without a fault; parts whose results are of the current code are skipped. Minutes are estimates; the stored
results are of two cores of an Intel Xeon.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks.decode.table import rows_of
from vllm_ppd.benchmarks.harness.results import stored
from vllm_ppd.benchmarks.results import outdated
from vllm_ppd.benchmarks.results.claims import THEOREM_SHARE
from vllm_ppd.heads.kinds import KINDS

ROOT = Path(__file__).resolve().parent.parent
RESULTS, WORK = ROOT / "benchmarks" / "results", Path("build/evidence")
PPD = ["-m", "vllm_ppd.vllm_plugins.cli.main", "bench"]
TARGET, INFLATED = "build/smollm/model", "build/inflated"
DRAFTS: dict[str, Any] = {"num_speculative_tokens": 3, "adaptive": False}
STAGES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # a core for each stage
GROUP_SPEED_UP = 1.5  # at three candidates, relative to the same stages


class Part(NamedTuple):
    """A file of results, and the commands that write it."""

    minutes: int
    commands: list[list[str]]  # words after `python`; each command adds to the file
    check: Callable[[Path], Iterator[str]] = lambda path: iter(())  # yields further faults of the file

    @property
    def lacks(self) -> list[str]:
        """Files that are missing on this machine."""
        words = (word.partition("=")[2] or word for command in self.commands for word in command)
        paths = {word for word in words if re.fullmatch(r"\S+/\S+", word) and "{" not in word}
        return sorted(path for path in paths if not Path(path).exists())


def parts(data: str) -> dict[str, Part]:
    """All parts, by the names of their results; the quick ones first."""
    smollm = ["--model", TARGET, "--data", f"spec-bench={data}/spec_bench.jsonl", "--top-p", "0.95"]
    plain = ["--model", TARGET, "--data", f"{data}/spec_bench.jsonl", "--dtype", "bfloat16", "--kv-cache-gib", "0.5"]
    eagle = f"--eagle={heads('eagle')}"
    lookup = f"cp + lookup={json.dumps({'model': heads('cp'), 'prompt_lookup_min': 2})}"
    ours = ["--heads", *(heads(kind) for kind in KINDS if Path(heads(kind)).exists()), "--also", lookup]
    decode = [*PPD, "decode", *plain, "--prompt-tokens", "256"]
    loads = ["--batch-sizes", "1,4,16", "--rounds", "4", "--new-tokens", "96"]
    methods = [*decode, *ours, "--plain", "ngram", eagle, *loads]
    ranks = [f"build/smollm/heads/{name}" for name in ("none-r1", "none-r3", "chain-r1", "chain-r3",
                                                       "recurrent-r1", "recurrent-r3", "recurrent-r8")]  # fmt: skip
    group = ["--model", f"{INFLATED}/model", "--heads", f"{INFLATED}/heads/early", "--group", "1,3,5",
             "--data", "build/corpus/validation.jsonl", "--dtype", "float32", "--kv-cache-gib", "0.25"]  # fmt: skip
    some = [*PPD, "acceptance", *smollm, "--prompts", "130"]
    return {
        "group": Part(30, [[*PPD, "decode", *group, "--rounds", "5", "--new-tokens", "96", "--batch-sizes", "1"]],
                      groups_are_as_fast_as_promised),
        "cp_conditions": Part(30, [[*PPD, "acceptance", *smollm, "--prompts", "52", "--plain", "none",
                                    "--batch-sizes", "4", "--heads", *ranks]], greedy_text_is_vllms),
        "serve": Part(45, [[*PPD, "serve", *plain, "--plain", "none", "--heads", heads("cp"), "--requests", "16",
                            "--rounds", "2", "--new-tokens", "64", "--rates", "0.5,1", "--concurrencies", "1,4"]]),
        "smollm_decode": Part(60, [[*methods, "--temperatures", "0,0.8"],
                                   [*methods, "--temperatures", "0.6", "--top-p", "0.9"]]),
        "acceptance": Part(75, [[*PPD, "acceptance", *smollm, "--plain", "none", "--heads", heads("cp")],
                                [*some, "--plain", "ngram", *ours, eagle]], greedy_text_is_vllms),
    }  # fmt: skip


def heads(kind: str) -> str:
    """The folder of the heads of SmolLM2 of a kind, or of EAGLE: in this repository, or in build/."""
    kept = f"benchmarks/smollm/heads/{kind}"
    return kept if Path(kept).exists() else f"build/smollm/heads/{kind}"


def faults(path: Path, part: Part) -> list[str]:
    """Reasons why a file is not a result of the current code."""
    if not path.exists():
        return ["is not there"]
    if outdated.older_than_code(path):
        return ["is of older code"]
    data = json.loads(path.read_text())
    runs = stored(path) if "runs" in data else []
    failures = [f"left out {name}: {reason}" for measured in runs for name, reason in measured.run["failures"].items()]
    failures += ["was stopped" for measured in runs if not measured.run["finished"]]
    return failures or list(part.check(path))


def greedy_text_is_vllms(path: Path) -> Iterator[str]:
    for measured in stored(path):
        for name in measured.contenders:
            turns = [turn for run in measured.runs_of(name) for turn in run["turns"] if turn["contender"] == name]
            different = sum(len(turn.get("differ", ())) for turn in turns)
            if different:
                yield f"{name}: {different} greedy texts are not vLLM's"


def groups_are_as_fast_as_promised(path: Path) -> Iterator[str]:
    for row in (row for measured in stored(path) for row in rows_of(measured)):
        speed_up = row["speed_up"][0]
        if row["contender"] == "group, k = 3" and speed_up < GROUP_SPEED_UP:
            yield f"{row['contender']} is {speed_up:.2f} times as fast as its stages, not {GROUP_SPEED_UP}"
        if row["predicted"] and speed_up < THEOREM_SHARE * row["predicted"]:
            yield f"{row['contender']}: {speed_up / row['predicted']:.2f} of the theorem, not {THEOREM_SHARE}"


def main() -> int:
    names = list(parts("."))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="build/data", metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="only show what each part would do")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the command that runs, whose end is waited for
    bad = 0
    for name, part in parts(args.data).items():
        if name not in args.only:
            continue
        kept, out = RESULTS / f"{name}.json", WORK / f"{name}.json"
        lacking = faults(kept, part)
        if not lacking:
            print(f"{name}: measured with today's code")
            continue
        minutes = f"about {part.minutes} minutes, starting at {time.strftime('%H:%M')}"
        print(f"{name}: {minutes}; the stored result {lacking[0]}", flush=True)
        if part.lacks:
            print(f"{name}: needs {', '.join(part.lacks)}")
            bad += 1
            continue
        if args.list:
            continue
        out.parent.mkdir(parents=True, exist_ok=True)
        lacking = []
        for words in part.commands:
            environment = {**(STAGES if name == "group" else {}), **os.environ}
            command = [sys.executable, *words, "--out", str(out)]
            code = subprocess.run(command, check=False, env=environment).returncode
            if code == 130:
                print("stopped; the same command continues")
                return 130
            lacking += [f"a command ended with code {code}"] * bool(code)
        lacking += faults(out, part)
        if lacking:
            bad += 1
            print(*(f"{name}: {fault}" for fault in lacking), sep="\n")
        else:
            shutil.copyfile(out, kept)
    if not args.list:
        print("now: python -m vllm_ppd.benchmarks.results.page")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
