# SPDX-License-Identifier: Apache-2.0
"""`make inflated` and `make bytes`: the models that speeds are measured on, with their heads and peers.

    python -m vllm_ppd.benchmarks.models.make_models inflated --out build     # the demo model at a larger one's cost
    python -m vllm_ppd.benchmarks.models.make_models bytes --out build        # a second demo model, of bytes
    python -m vllm_ppd.benchmarks.models.make_models bytes --out build --list  # the commands that are left to run

A step whose last file is there is not done again, so a stopped run goes on where it was. See demo/README.md.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_ppd.benchmarks import only_writer
from vllm_ppd.benchmarks.models.train import DEMO

KINDS = ("early", "cp", "dynamo")
PEERS = {"eagle": ("--steps", "480"), "medusa": ("--heads", "4", "--steps", "480"), "draft_model": ("--steps", "240")}
HEADS_OF_BYTES = {
    "early": ("--steps", "120", "--num-speculative-tokens", "4"),
    "cp": ("--rank", "3", "--positions", "5", "--num-speculative-tokens", "4", "--steps", "120"),
    "dynamo": ("--steps", "120", "--mask-entries", "100000"),
}
CALIBRATED = ".calibrated"  # marks a heads folder whose calibration has ended


class Step(NamedTuple):
    """A command, and the file that it writes last, or that is written once it has ended."""

    result: Path
    words: list[str]
    mark: bool = False  # the result is an empty file that says so

    @property
    def done(self) -> bool:
        return self.result.exists()

    def run(self) -> None:
        print(f"{shlex.join(self.words[2:])} ...", flush=True)
        subprocess.run(self.words, check=True)
        if self.mark:
            self.result.touch()


def steps(target: str, build: Path) -> Iterator[Step]:
    """All steps of a target, in order."""
    corpus = build / "corpus"
    yield _script(corpus / "validation.jsonl", "corpus", "--out", corpus)
    if target == "inflated":
        heads = [DEMO / "heads" / kind for kind in KINDS]
        for folder, parameters in (("inflated100", "100M"), ("inflated", "300M")):
            yield _inflated(build / folder, DEMO / "model", heads, parameters)
        yield from _peers(build / "peers", DEMO / "model", tuple(PEERS), build / "inflated")
        yield from (_calibrated(build / "inflated" / "heads" / kind, corpus) for kind in KINDS)
        return
    own = build / "bytes"
    model, large = own / "model", own / "inflated"
    yield _script(model / "provenance.json", "train", "--vocabulary", "257", "--out", model)
    for kind in KINDS:
        out = own / "heads" / kind
        data = ("--model", model, "--data", corpus / "train.jsonl", "--out", out)
        yield _ppd(out / "provenance.json", "train", kind, *HEADS_OF_BYTES[kind], *data)
        yield _calibrated(out, corpus, "--prompt-tokens", "192")
    yield _inflated(large, model, [own / "heads" / kind for kind in KINDS], "450M")
    yield from _peers(own / "peers", model, ("eagle", "medusa"), large)
    yield from (_calibrated(large / "heads" / kind, corpus, "--prompt-tokens", "192") for kind in KINDS)


def _inflated(out: Path, model: Path, heads: list[Path], parameters: str) -> Step:
    last = out / "heads" / heads[-1].name / "provenance.json"
    return _script(last, "inflate", "--model", model, "--parameters", parameters, "--out", out, "--heads", *heads)


def _peers(out: Path, model: Path, names: tuple[str, ...], inflated: Path) -> Iterator[Step]:
    """Peers of a model, and the same as wide as its inflated target."""
    for name in names:
        folder, grown = out / name, inflated / "peers"
        yield _script(folder / "provenance.json", "peers.train", name, *PEERS[name], "--model", model, "--out", folder)
        made_for = ("--model", inflated / "model", "--out", grown)
        yield _script(grown / name / "config.json", "peers.inflate", "--peers", folder, *made_for)


def _calibrated(heads: Path, corpus: Path, *further: str) -> Step:
    step = _ppd(heads / CALIBRATED, "calibrate", heads, "--data", corpus / "validation.jsonl", *further)
    return step._replace(mark=True)


def _script(result: Path, name: str, *words: str | Path) -> Step:
    return Step(result, [sys.executable, "-m", f"vllm_ppd.benchmarks.models.{name}", *map(str, words)])


def _ppd(result: Path, *words: str | Path) -> Step:
    return Step(result, [sys.executable, "-m", "vllm_ppd.vllm_plugins.cli.main", *map(str, words)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["inflated", "bytes"])
    parser.add_argument("--out", type=Path, default=Path("build"))
    parser.add_argument("--list", action="store_true", help="show the commands that are left, and run none")
    args = parser.parse_args()
    try:
        if args.list:
            print(*(shlex.join(step.words) for step in steps(args.target, args.out) if not step.done), sep="\n")
            return
        with only_writer(args.out):
            for step in steps(args.target, args.out):
                if not step.done:
                    step.run()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{shlex.join(error.cmd)} ended with code {error.returncode}; the same command goes on there")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on there")


if __name__ == "__main__":
    main()
