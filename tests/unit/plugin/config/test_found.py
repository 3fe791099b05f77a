# SPDX-License-Identifier: Apache-2.0
"""Heads that `--speculative-model ppd` finds: with the model, on its Hub, or registered
by `ppd fit`; and what is done with those that cannot be used.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from configured import drafting, from_dict, from_flags
from conftest import DEMO, Factory, our_log
from hub import running_hub
from huggingface_hub import constants
from vllm import envs

from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.hub import pinned_within
from vllm_ppd.vllm_plugins.config import found
from vllm_ppd.vllm_plugins.config.options import OptionError

PPD = {"method": "ppd"}


@pytest.fixture(autouse=True)
def caches(
    tiny_model: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """vLLM's caches, with nothing but what it knows of models' classes."""
    from_dict(tiny_model(), None)  # the first one in a process resets the loggers
    known = Path(envs.VLLM_CACHE_ROOT) / "modelinfos"
    known.mkdir(parents=True, exist_ok=True)
    folder = tmp_path / "caches"
    folder.mkdir()
    (folder / known.name).symlink_to(known)
    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(folder))
    return folder


@pytest.fixture
def model(tiny_model: Factory, tmp_path: Path) -> Path:
    """A copy of the tiny llama, which may get heads."""
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


@pytest.fixture
def copied(whole_heads: Factory, tmp_path: Path) -> Callable[..., Path]:
    """copied(kind, to): a copy of heads for the tiny llama."""
    return lambda kind, to: Path(
        shutil.copytree(whole_heads(kind), tmp_path / to)
    )


def found_by(model: Any, **options: Any) -> tuple[Any, list[str]]:
    """Our configuration, and the lines before the start-up line."""
    with our_log(logging.INFO) as lines:
        config = drafting(from_dict(model, PPD | options))
    return config, [line for line in lines if " method " not in line]


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def promising(folder: Path, accepted: float) -> Path:
    """Give heads a calibration, that of the demo model's with other drafts accepted."""
    demo = DEMO.parent / "heads" / "cp" / "calibration.json"
    data = json.loads(demo.read_text())
    data["parts"].pop("vocabulary", None)
    for part in data["parts"]["acceptance"].values():
        for by in part["by_drafts"]:
            by["length"] = 1 + accepted
    (folder / "calibration.json").write_text(json.dumps(data))
    return folder


def test_heads_travel_with_a_model(model: Path, copied: Factory) -> None:
    config, lines = found_by(model)
    assert config.method == "lookup" and config.model is None
    assert f"`ppd fit {model}` makes some" in lines[0] and len(lines) == 1
    heads = str(copied("cp", "model/ppd"))
    config, lines = found_by(model)
    assert (config.method, config.model) == ("cp", heads)
    (line,) = lines
    assert heads in line and "travel with the model" in line
    assert f"--ppd-heads {heads} pins them; --ppd-heads none uses none" in line


def test_options_of_early_drafting_keep_their_meaning(
    model: Path, copied: Factory
) -> None:
    copied("cp", "model/ppd")
    for options in ({"exit_layer": 3}, {"gamma": 0.5}):
        config, lines = found_by(model, **options)
        assert (config.method, config.model, lines) == ("early", None, [])
    group = from_dict(model, PPD | {"candidates": 2}, pipeline_parallel_size=2)
    assert (drafting(group).method, drafting(group).model) == ("group", None)
    assert drafting(from_dict(model, {"method": "lookup"})).model is None


def test_heads_are_pinned_or_left_out(model: Path, copied: Factory) -> None:
    copied("cp", "model/ppd")
    early = copied("early", "early")
    flags = "--speculative-model ppd --ppd-heads"
    config, lines = found_by(model, heads="none")
    assert (config.method, config.model, lines) == ("lookup", None, [])
    assert drafting(from_flags(model, f"{flags} none")) == config
    for pinned, method in ((early, "early"), (model / "ppd", "cp")):
        config = drafting(from_flags(model, f"{flags} {pinned}"))
        assert (config.method, config.model) == (method, str(pinned))
    with pytest.raises(HeadsError, match="does not exist; pass a folder"):
        from_flags(model, f"{flags} {model}/none")
    change(early, fingerprint={"vocabulary": "0"})
    with pytest.raises(HeadsError, match="hash of its vocabulary differs"):
        from_flags(model, f"{flags} {early}")
    with pytest.raises(OptionError, match="both set; set only one"):
        from_dict(model, {"model": str(early), "heads": "none"})
    with pytest.raises(OptionError, match="heads is an option of method ppd"):
        from_dict(model, {"method": "lookup", "heads": "none"})


def test_registered_heads_that_promise_most_are_taken(
    model: Path, copied: Factory, caches: Path
) -> None:
    for name, accepted in (("a", 0.2), ("b", 0.9), ("c", 0.3), ("none", 0)):
        found.register(promising(copied("cp", name), accepted))
    found.register(copied("cp", "uncalibrated"))
    found.register(model.parent / "b")  # again
    config, (line,) = found_by(model)
    assert config.model == str(model.parent / "b")
    assert "their calibration predicts the most of 4" in line
    shutil.rmtree(model.parent / "b")
    assert found_by(model)[0].model == str(model.parent / "c")
    shutil.rmtree(model.parent / "c")
    (model.parent / "a" / "config.json").write_text("[]")
    config, lines = found_by(model)
    assert config.model == str(model.parent / "uncalibrated")
    for line, following in zip(lines, ("b", "c", "uncalibrated"), strict=False):
        assert line.endswith(f"Next: heads {model.parent / following}")
    assert len(lines) == 4
    assert found_by(DEMO)[0].model == str(DEMO / "ppd"), "another target"
    traveling = copied("early", "model/ppd")
    assert found_by(model)[0].model == str(traveling)
    for path in (caches / "vllm_ppd_heads").iterdir():
        shutil.rmtree(path)
        path.write_text("damaged")
    config, lines = found_by(model)
    assert config.model == str(traveling) and len(lines) == 2
    assert "cannot be listed" in lines[0]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            "is not valid JSON",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"x"),
            "is not whole safetensors",
        ),
        (
            lambda folder: change(folder, fingerprint={"vocabulary": "0"}),
            "hash of its vocabulary differs",
        ),
        (
            lambda folder: change(folder, fingerprint={"lm_head": "0"}),
            "lm_head has other values",
        ),
    ],
)
def test_unusable_heads_are_one_line(
    model: Path, copied: Factory, damage: Callable[[Path], Any], reason: str
) -> None:
    traveling = copied("cp", "model/ppd")
    damage(traveling)
    config, (line,) = found_by(model)
    assert config.method == "lookup" and config.model is None
    assert reason in line and line.endswith("Next: lookups alone")
    found.register(copied("recurrent", "registered"))
    config, lines = found_by(model)
    assert config.model == str(model.parent / "registered")
    assert reason in lines[0] and len(lines) == 2


def test_settings_that_heads_refuse_are_one_line(
    model: Path, copied: Factory
) -> None:
    """The same settings are served with lookups."""
    copied("cp", "model/ppd")
    config, (line,) = found_by(model, num_speculative_tokens=4)
    assert (config.method, config.num_speculative_tokens) == ("lookup", 4)
    assert "is more than the 2 drafts that the heads" in line


def test_heads_on_the_hub(
    tiny_model: Factory,
    model: Path,
    copied: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_hub(tmp_path, monkeypatch) as hub:
        hub.add("acme/plain", tiny_model())
        assert found_by("acme/plain")[0].method == "lookup"
        assert hub.requests.count("ppd/config.json") == 1
        hub.add("acme/model", tiny_model())
        copied("cp", "model/ppd")
        (model / "ppd" / "more").mkdir()
        (model / "ppd" / "pickle.bin").touch()
        hub.add("acme/model", model, "v2")
        hub.requests.clear()
        vllm_config = from_dict("acme/model", PPD, revision="v2")  # type: ignore[arg-type]
        heads = f"acme/model@{hub.commit('acme/model', 'v2')}:ppd"
        assert drafting(vllm_config).model == heads
        assert drafting(vllm_config).method == "cp"
        assert "ppd/model.safetensors" in hub.requests
        assert not {"ppd/pickle.bin", "model.safetensors"} & set(hub.requests)
        assert found_by("acme/model")[0].method == "lookup", "its main branch"
        by_name = from_flags(tiny_model(), f"--speculative-model {heads}")
        assert drafting(by_name).model == heads
        hub.requests.clear()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        found_by("acme/plain")
        assert hub.requests == []


def test_a_slow_hub_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub(tmp_path, monkeypatch) as hub:
        answer = hub.answer

        def slow(*args: Any) -> Any:
            time.sleep(1)
            return answer(*args)

        monkeypatch.setattr(hub, "answer", slow)
        with pytest.raises(
            HeadsError, match=r"not answered for .* within 0\.2 s"
        ):
            pinned_within(0.2, "acme/model:ppd")
    assert found.HUB_SECONDS <= 5
