# SPDX-License-Identifier: Apache-2.0
"""The target that heads name: where it is looked for, what is said where it is not, and how another is named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import heads_folders
import pytest
from conftest import ROOT
from refusals import edited
from vllm import EngineArgs

from vllm_ppd.heads.calibration.options import CalibrationOptions
from vllm_ppd.heads.calibration.run import checked
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.io import check_folder, load_calibration, load_config
from vllm_ppd.heads.target import find_target, stored_name
from vllm_ppd.vllm_plugins.cli.main import main
from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.config.options import OptionError

Model = Callable[..., Path]


@contextmanager
def current_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def test_targets_travel_with_a_checkout(tiny_model: Model, tmp_path: Path, capsys: Any) -> None:
    """A relative path is looked for from the heads' folder upwards, from wherever it is asked."""
    checkout = tmp_path / "checkout"
    model = Path(shutil.copytree(tiny_model(), checkout / "models" / "tiny"))
    (tmp_path / "elsewhere").mkdir()
    with current_folder(checkout):
        assert stored_name("models/tiny", "heads/cp") == "models/tiny"
        assert stored_name("models/tiny", tmp_path / "elsewhere") == str(model)
        assert stored_name("org/name", "heads/cp") == "org/name"
        folder = heads_folders.make_heads(checkout / "heads" / "cp", "cp", Path("models/tiny"))
        assert find_target("models/tiny", folder) == "models/tiny"
    moved = tmp_path / "moved"
    checkout.rename(moved)
    folder = moved / "heads" / "cp"
    assert load_config(folder).verifier == "models/tiny"
    with current_folder(tmp_path / "elsewhere"):
        found = str(moved / "models" / "tiny")
        assert main(["inspect", str(folder)]) == 0
        assert f"will load: yes, with {found}" in capsys.readouterr().out
        assert checked(CalibrationOptions(heads=str(folder), data=("-",)))[2] == found
        config = EngineArgs(model=str(folder), dtype="float32", kv_cache_memory_bytes=1 << 24).create_engine_config()
        assert config.model_config.model == config.model_config.tokenizer == found
        active = active_config(config)
        assert active is not None and active.model == str(folder)


def test_a_target_that_is_nowhere(tiny_model: Model, tmp_path: Path, capsys: Any) -> None:
    """It is said which was looked for, and how to name another; naming another works."""
    folder = heads_folders.make_heads(tmp_path / "heads", "cp", tiny_model())
    edited("speculators_config", "verifier", "name_or_path", value="some/old/path")(folder)
    with pytest.raises(HeadsError, match=r"target 'some/old/path' of the heads in .*; give its folder with --target"):
        checked(CalibrationOptions(heads=str(folder), data=("-",)))
    with pytest.raises(HeadsError, match=r"'some/old/path'.*; name it: vllm serve TARGET --speculative-model HEADS"):
        EngineArgs(model=str(folder)).create_engine_config()
    assert main(["inspect", str(folder)]) == 0
    assert (
        "target 'some/old/path' is not on this disk, so it was not compared (give --target DIR)"
        in capsys.readouterr().out
    )
    assert main(["inspect", str(folder), "--target", str(tiny_model())]) == 0
    assert f"will load: yes, with {tiny_model()}" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--target", str(tiny_model("qwen2"))]) == 2
    assert checked(CalibrationOptions(heads=str(folder), data=("-",), model=str(tiny_model())))[2] == str(tiny_model())


def test_serving_heads_keeps_what_is_asked(tiny_model: Model, whole_heads: Callable[[str], Path]) -> None:
    folder = str(whole_heads("early"))
    args = EngineArgs(model=folder, dtype="float32", spec_tokens=1, speculative_config={"method": "paradecode"})
    config = active_config(args.create_engine_config())
    assert config is not None
    assert (config.method, config.num_speculative_tokens, config.exit_layer) == ("paradecode", 1, (4,))
    for asked, message in (
        ({"method": "cp"}, "method='cp' does not draft with early heads"),
        ({"model": "x/y"}, "another model"),
    ):
        with pytest.raises(OptionError, match=message):
            EngineArgs(model=folder, speculative_config=asked).create_engine_config()


def test_the_demo_heads_are_sound_from_anywhere(tmp_path: Path) -> None:
    demo = ROOT / "benchmarks" / "demo"
    with current_folder(tmp_path):
        for kind in heads_folders.KINDS:
            config = check_folder(demo / "heads" / kind)
            assert find_target(config.verifier, demo / "heads" / kind) == str(demo / "model")
            load_calibration(demo / "heads" / kind)
