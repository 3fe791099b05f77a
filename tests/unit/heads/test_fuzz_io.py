# SPDX-License-Identifier: Apache-2.0
"""Heads folders damaged at random: each is taken, or refused in one line; nothing hangs.

What must be refused is in test_io.py.
"""

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
from conftest import Factory
from damages import RULES
from refusals import Readers

CASES = 40  # a kind
SECONDS, BYTES = 30, 2 << 30  # of a case; of memory in all


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
    memory, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for case in range(CASES):
        rng, folder = random.Random(f"{kind} {case}"), tmp_path / f"{kind}{case}"
        shutil.copytree(whole_heads(kind), folder)
        told = f"case {case}: {RULES[case % len(RULES)](folder, rng)}"
        for name in readers.of:
            started = time.process_time()
            with within(SECONDS, f"{told}, {name}"):
                refused += readers.refusal(name, str(folder)) is not None
            assert time.process_time() - started < SECONDS, told
        shutil.rmtree(folder)
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) < BYTES
    assert CASES * len(readers.of) / 2 < refused < CASES * len(readers.of)


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
