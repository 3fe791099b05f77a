# SPDX-License-Identifier: Apache-2.0
"""Heads by their name on a Hub of the loopback interface: what is fetched, and what is
said where that fails.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import heads_folders
import pytest
from conftest import Factory, patterned_texts, write_texts
from hub import TOKEN, Hub, running_hub
from huggingface_hub import constants
from huggingface_hub.utils import _http
from refusals import SERVE, Readers, tensor, with_value

from vllm_ppd.heads.folder import load_config, load_tensors
from vllm_ppd.heads.hub import hub_name, pinned, whole_folder
from vllm_ppd.vllm_plugins.cli.main import main
from vllm_ppd.vllm_plugins.config.naming import is_ours, served_heads
from vllm_ppd.vllm_plugins.config.options import OptionError

NAME = "acme/tiny-cp"
ALONE = ("model alone", "inspect")


@pytest.fixture
def hub(
    whole_heads: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """The Hub with CP heads, its cache empty."""
    # It waits between its attempts.
    clock = SimpleNamespace(sleep=lambda _: None, time=time.time)
    monkeypatch.setattr(_http, "time", clock)
    with running_hub(tmp_path, monkeypatch) as running:
        running.add(NAME, whole_heads("cp"))
        yield running


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_name("acme/x.1-y_z") == ("acme/x.1-y_z", None, None)
    assert hub_name("acme/x@refs/pr/3") == ("acme/x", "refs/pr/3", None)
    assert hub_name("acme/x@v1:ppd") == ("acme/x", "v1", "ppd")
    for path in (
        "x",
        "./a/b",
        "/a/b",
        "a/b/c",
        "a/..",
        "a/b@",
        "a/b.gguf",
        "a/b:Q4",
        "s3://a/b",
    ):
        assert hub_name(path) is None, path
    (tmp_path / "acme" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("acme/x") is None, "a folder of this disk goes before the Hub"


def test_every_way_in_takes_a_name(
    hub: Hub, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers.assert_taken(NAME)
    # The server's processes get the commit, so that all of them draft with the same
    # heads.
    config = readers.server(spec_model=NAME)
    assert config.model == f"{NAME}@{hub.commit(NAME, 'main')}"
    hub.folders.clear()
    loaded, tensors = load_tensors(config.model)
    assert tensors.keys() == loaded.shapes().keys()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    readers.assert_taken(NAME, *ALONE, SERVE)


def test_inspect_does_not_fetch_weights(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", NAME]) == 0
    said = capsys.readouterr().out
    assert "not fetched" in said and "will load: yes, with " in said
    assert "model.safetensors" not in hub.requests
    whole_folder(NAME)
    assert main(["inspect", NAME]) == 0
    assert "not fetched" not in capsys.readouterr().out


def test_damaged_weights_are_refused(
    hub: Hub, readers: Readers, whole_heads: Factory, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole_heads("cp"), tmp_path / "damaged")
    tensor("cp.gate", with_value(float("nan")))(folder)
    hub.add("acme/damaged", folder)
    # The server has fetched the weights
    readers.assert_refused("not finite", "acme/damaged", *ALONE, SERVE)
    (folder / "model.safetensors").unlink()
    hub.add("acme/none", folder)
    message = "has no model.safetensors"
    readers.assert_refused(message, "acme/none", "model alone")


def test_revisions(
    hub: Hub, tiny_model: Factory, tmp_path: Path, readers: Readers
) -> None:
    other = heads_folders.make_heads(
        tmp_path / "v2", "cp", tiny_model(), num_speculative_tokens=1
    )
    hub.add(NAME, other, "v2")
    commit = f"{NAME}@{hub.commit(NAME, 'v2')}"
    assert pinned(f"{NAME}@v2") == commit
    for name in (f"{NAME}@v2", commit):
        assert readers.server(spec_model=name).num_speculative_tokens == 1
    served_as = served_heads(f"{NAME}@v2", None)
    assert served_as is not None
    assert (served_as[0], served_as[1]["model"]) == (str(tiny_model()), commit)
    readers.assert_refused("Revision Not Found", f"{NAME}@v9", "model alone")
    with pytest.raises(OptionError, match="--revision is the target's"):
        served_heads(NAME, None, "v2")


def test_models_of_vllm_are_left_to_it(hub: Hub, tiny_model: Factory) -> None:
    hub.add("acme/target", tiny_model())
    assert not is_ours({"model": "acme/target"})
    assert served_heads("acme/target", None) is None
    assert served_heads("acme/nobody", None) is None
    assert "model.safetensors" not in hub.requests


def test_what_the_hub_refuses_is_one_line(
    hub: Hub, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "'acme/nobody' is not a folder, and cannot be read from the Hub: "
    names = (*ALONE, "calibrate")
    readers.assert_refused(f"{message}401", "acme/nobody", *names)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    readers.assert_refused(message, "acme/nobody", *names)


def test_tokens(
    hub: Hub, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private = {NAME}
    message = "cannot be read from the Hub: 401"
    readers.assert_refused(message, NAME, "inspect")
    config = readers.server(spec_model=NAME, hf_token=TOKEN)
    assert config is not None, "vLLM's --hf-token"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", constants.HF_HUB_CACHE + "-2")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    readers.assert_taken(NAME, "inspect")


def test_heads_of_a_target_on_the_hub(
    hub: Hub, tiny_model: Factory, tmp_path: Path
) -> None:
    hub.add("acme/target", tiny_model())
    data = write_texts(tmp_path / "data.jsonl", patterned_texts(30, 30))
    heads = tmp_path / "heads"
    words = (
        f"train early --model acme/target --data {data} --out {heads} --steps 1"
    )
    sizes = "--batch-size 1 --sequence-length 64 --dtype float32"
    assert main([*words.split(), *sizes.split()]) == 0
    config = load_config(heads)
    assert config.verifier == "acme/target"
    assert config.fingerprint.vocabulary and config.fingerprint.lm_head
    assert "base_model: acme/target" in (heads / "README.md").read_text()
