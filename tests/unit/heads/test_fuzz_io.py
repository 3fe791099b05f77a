# SPDX-License-Identifier: Apache-2.0
"""Heads folders damaged at random: each is refused in one line, or taken where the damage is none; nothing hangs.

What is harmful is judged by rules of this file's own, not by those of the reader.
"""

import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import heads_folders
import pytest
import torch
from conftest import Factory
from damages import ODD, RULES, places, put
from refusals import Readers
from safetensors import safe_open
from safetensors.torch import load_file

CASES = 40  # a kind
SECONDS, BYTES = 30, 2 << 30  # of a case; of memory in all
HARMFUL, HARMLESS, UNSAID = "harmful", "harmless", "unsaid"
# Another value of these may be as good, or say what only some of the ways in compare.
OTHERWISE = {
    "speculative_tokens", "draft_vocab_size", "dtype", "name_or_path", "model_type", "num_hidden_layers", "fingerprint",
    "head", "exit_layers", "default_exit_layers", "positions", "rank", "factorised", "token_counts",
    "tokens", "layer_tensors", "cooccurrence_entries", "sampling",
    "method", "n_predict", "emb_dim", "inner_dim", "input_hidden_dim", "proj_dim", "tie_weights", "tie_lstm_embs",
    "scale_input", "n_candidates", "top_k_tokens_per_head",
}  # fmt: skip


# ---- what is harmful


def judged(folder: Path, sound: Path) -> str:
    """Whether a damaged folder may be taken."""
    try:
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).resolve().is_file() or (folder / name).stat().st_size > 1 << 20:
                return HARMFUL
        config = json.loads((folder / "config.json").read_bytes().decode())
        with safe_open(folder / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        before, was = json.loads((sound / "config.json").read_text()), load_file(sound / "model.safetensors")
        bad = any(_bad_tensor(name, tensors.get(name), value) for name, value in was.items())
        return HARMFUL if bad else _judged_config(config, before)
    except Exception:  # whatever cannot be read at all
        return HARMFUL


def _bad_tensor(name: str, now: torch.Tensor | None, was: torch.Tensor) -> bool:
    if now is None or now.shape != was.shape or was.is_floating_point() != now.is_floating_point():
        return True
    if was.is_floating_point():
        return now.dtype != was.dtype or not all(map(math.isfinite, now.flatten().tolist()))
    numbers = now.tolist()
    if now.dtype not in (torch.int32, torch.int64) or min(numbers) < 0:
        return True
    order = int(name.split(".")[1]) if name.endswith(".keys") else 0
    if order:
        return numbers != sorted(set(numbers)) or numbers[-1] >= 320**order
    # The corpus has 320 tokens, and as many n-grams of each order: no counts can be more, and no total less.
    if name.endswith("totals"):
        return min(numbers) < 320
    return name != "token_counts" and sum(numbers) > 320


def _judged_config(now: Any, was: dict[str, Any]) -> str:
    if type(now) is not dict:
        return HARMFUL
    verdict = HARMLESS
    for path in {*_leaves(was)}:
        before, after = _at(was, path), _at(now, path)
        if type(after) is type(before) and after == before:
            continue
        ignored = path[0] == "architectures" or path[-1] in ("algorithm", "default_proposal_method", "proposal_type")
        ignored |= after is _GONE and (path, before) in ((("condition",), "none"), (("layers",), []))  # the defaults
        if ignored or path[:3] == ("speculators_config", "verifier", "architectures"):
            continue
        if {*map(str, path)} & OTHERWISE:
            verdict = UNSAID
            wrong_type = isinstance(after, bool) != isinstance(before, bool) or (
                isinstance(after, float) and math.isnan(after)
            )
            if wrong_type and after is not _GONE and after is not None and _at(now, path[:-1]) is not _GONE:
                return HARMFUL
            continue
        return HARMFUL
    return verdict


_GONE = object()


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items or not value:
        yield path
    for key, inner in items:
        yield from _leaves(inner, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return _GONE
    return value


@contextmanager
def within(seconds: int, what: str) -> Iterator[None]:
    """Whatever hangs is interrupted."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"{what}: more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", heads_folders.KINDS)
def test_damaged_heads_folders(readers: Readers, whole_heads: Factory, tmp_path: Path, kind: str) -> None:
    memory, verdicts = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for case in range(CASES):
        rng, folder = random.Random(f"{kind} {case}"), tmp_path / f"{kind}{case}"
        shutil.copytree(whole_heads(kind), folder)
        told = f"case {case}: {RULES[case % len(RULES)](folder, rng)}"
        verdict = judged(folder, whole_heads(kind))
        verdicts.append(verdict)
        for name in readers.of:
            started = time.process_time()
            with within(SECONDS, f"{told}, {name}"):
                line = readers.refusal(name, str(folder))
            assert time.process_time() - started < SECONDS, told
            assert verdict != HARMFUL or line is not None, f"{told}: {name} takes it"
            assert verdict != HARMLESS or line is None, f"{told}: {name} refuses what is harmless: {line}"
        shutil.rmtree(folder)
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) < BYTES
    assert verdicts.count(HARMFUL) > CASES / 2
    assert HARMLESS in verdicts


@pytest.mark.parametrize("kind", heads_folders.KINDS)
def test_damaged_reports(readers: Readers, whole_heads: Factory, tmp_path: Path, kind: str) -> None:
    """A plan, or one line; whoever does not read them takes the heads."""
    folder = Path(shutil.copytree(whole_heads(kind), tmp_path / kind))
    path, content = folder / "calibration.json", (whole_heads(kind) / "calibration.json").read_text()
    refused = 0
    for case in range(CASES):
        rng = random.Random(f"{kind} {case}")
        data = json.loads(content)
        place, value = rng.choice(list(places(data))), rng.choice(ODD)
        put(data, place, value)
        path.write_text(json.dumps(data) if case % 5 else content[: rng.randrange(len(content))])
        told = f"case {case}: {place} is {value!r}"[:200]
        with within(SECONDS, told):
            refused += readers.refusal("plan", str(folder)) is not None
            assert readers.refusal("inspect", str(folder)) is None, told
    assert refused > CASES / 2
    assert readers.refusal("model alone", str(folder)) is None


@pytest.mark.parametrize("program", ["ppd", "vllm"])
def test_the_commands_end_with_code_2(program: str, whole_heads: Factory, tmp_path: Path) -> None:
    """The programs themselves: one line at the end, exit code 2."""
    folder = Path(shutil.copytree(whole_heads("cp"), tmp_path / "cp"))
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    command = {
        "ppd": ["-m", "vllm_ppd.vllm_plugins.cli.main", "inspect", str(folder)],
        "vllm": ["-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--host", "127.0.0.1", "--port", "0"],
    }[program]
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert run.returncode == 2, run.stderr
    line = run.stderr.strip().splitlines()[-1]
    assert "model.safetensors in " in line
    assert "is not a regular file; write the heads again" in line
    assert len(line) <= 330
    assert "Traceback" not in run.stderr
