# SPDX-License-Identifier: Apache-2.0
"""One writer a folder: a second one is refused in one line, and harms nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ppd.heads.files import (
    InUse,
    replaced,
    write_text,
    writing_file,
    writing_folder,
)

HOLDS = """
import sys, time
from vllm_ppd.heads.files import writing_folder
with writing_folder(sys.argv[1]):
    print("holds", flush=True)
    time.sleep(600)
"""


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", HOLDS, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        message = "--out .* is being written by another process; wait for it"
        with pytest.raises(InUse, match=message), writing_folder(out):
            pass
        holder.kill()
    with writing_folder(out):
        pass


def test_processes_may_write_the_same_file_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    with replaced(path) as new:
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_text(path, "theirs")
        new.write_text("ours")
    assert path.read_text() == "ours" and list(tmp_path.iterdir()) == [path]


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    """An engine may outlive the process that started it."""
    ours, theirs = os.pipe()
    with writing_file(tmp_path / "a.jsonl"):
        child = os.fork()
        if not child:
            os.read(ours, 1)
            os._exit(0)
    try:
        with writing_file(tmp_path / "a.jsonl"):
            pass
    finally:
        os.write(theirs, b".")
        os.waitpid(child, 0)


def test_a_file_is_one_by_whatever_path_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with (
        writing_file(tmp_path / "a"),
        pytest.raises(InUse),
        writing_file(tmp_path / "link" / "a"),
    ):
        pass
