# SPDX-License-Identifier: Apache-2.0
"""Files of a heads folder: whole or not at all, on the disk, as the umask allows, and read within bounds."""

import os
import stat
from pathlib import Path

import heads_folders
import pytest
import torch
from conftest import Factory

from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import read_json_object, write_tensors, write_text
from vllm_ppd.heads.io import save_heads


def test_links_are_not_followed_when_files_are_written(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name, write in (
        ("config.json", lambda path: write_text(path, "new")),
        ("model.safetensors", lambda path: write_tensors(path, {"a": torch.zeros(2)}, {})),
    ):
        (tmp_path / f"{name}.part").symlink_to(victim)
        write(tmp_path / name)
        assert victim.read_text() == "mine"
        assert not (tmp_path / name).is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors", "victim"]


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_modes_follow_the_umask(tiny_model: Factory, tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        config = heads_folders.config_of("cp", tiny_model())
        save_heads(tmp_path / "heads", config, heads_folders.blank_tensors(config))
    finally:
        os.umask(before)
    for name in ("config.json", "model.safetensors"):
        assert stat.S_IMODE((tmp_path / "heads" / name).stat().st_mode) == mode


def test_files_are_on_the_disk_before_they_replace_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (order.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"), sync(fd))[1]
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("replace"), replace(*paths))[1])
    write_text(tmp_path / "a", "text")
    write_tensors(tmp_path / "b", {"a": torch.zeros(2)}, {})
    assert order == ["file", "replace", "folder"] * 2


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    assert path.read_text() == "old"


def test_json_reader(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2]}')
    assert read_json_object(path, 13) == {"a": [1, 2]}
    with pytest.raises(HeadsError, match=r"a\.json .* has 13 bytes, more than the limit of 12; do this"):
        read_json_object(path, 12, "do this")
