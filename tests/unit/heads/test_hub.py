# SPDX-License-Identifier: Apache-2.0
"""Heads by their name on a Hub of the loopback interface: what is fetched, and what is said where that fails."""

import json
import logging
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import heads_folders
import pytest
from conftest import Factory, our_log, patterned_texts, write_texts
from hub import TOKEN, Hub, at, running_hub, use
from huggingface_hub import constants
from huggingface_hub.utils import _http
from refusals import SERVE, Readers, Refused, command, tensor, with_value
from vllm import envs

from vllm_ppd.heads.hub import folder_of, hub_name, pinned
from vllm_ppd.heads.io import load_config, load_tensors
from vllm_ppd.vllm_plugins.cli.main import main
from vllm_ppd.vllm_plugins.config.naming import is_ours, served_heads
from vllm_ppd.vllm_plugins.config.options import OptionError

NAME = "acme/tiny-cp"


@pytest.fixture(scope="module")
def served() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(served: Hub, whole_heads: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub with CP heads, its cache empty."""
    use(served, tmp_path, monkeypatch)
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: None, time=time.time))  # between its attempts
    served.revisions, served.gated, served.private, served.broken = {}, set(), set(), False
    served.requests.clear()
    served.sent.clear()
    served.add(NAME, whole_heads("cp"))
    yield served


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_name("acme/x.1-y_z") == ("acme/x.1-y_z", None)
    assert hub_name("acme/x@v1.0") == ("acme/x", "v1.0")
    assert hub_name("acme/x@refs/pr/3") == ("acme/x", "refs/pr/3")
    for path in ("x", "./a/b", "../a", "/a/b", "a/b/c", "a/..", "a/b@", "a@b/c", "a/b--c", "a/b.gguf", "a/" + "b" * 400,
                 "a/b\n", "", "s3://a/b", "ä/b"):  # fmt: skip
        assert hub_name(path) is None, path
    (tmp_path / "acme" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("acme/x") is None, "a folder of this disk goes before the Hub"


def test_every_way_in_takes_a_name(hub: Hub, readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refusals.method_of", lambda _: "cp")
    for name in readers.of:
        assert readers.refusal(name, NAME) is None, name
    # The server's processes are told the commit, so that all of them draft with the same heads.
    commit = hub.commit(NAME, "main")
    config = readers.server(spec_model=NAME)
    assert config.model == f"{NAME}@{commit}"
    assert config.num_speculative_tokens == 2
    asked = len(hub.requests)
    assert load_tensors(config.model)[1].keys() == load_config(config.model).shapes().keys()
    assert len(hub.requests) == asked, "a commit that is in the cache needs no Hub"


def test_inspect_does_not_fetch_weights(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", NAME]) == 0
    said = capsys.readouterr().out
    assert "kind  " in said and "not fetched" in said and "calibrated  " in said
    assert "will load: yes, with " in said and "weights are checked after they are fetched" in said
    whole = (hub.folder(NAME, str(hub.commit(NAME, "main"))) / "model.safetensors").stat().st_size
    assert whole > 100_001, "the header is read with the first 100,001 bytes"
    assert hub.sent["model.safetensors"] <= 2 * 100_001 and not list(Path(constants.HF_HUB_CACHE).rglob("model.safet*"))
    folder_of(NAME, "config.json", "model.safetensors")
    assert main(["inspect", NAME]) == 0
    assert "not fetched" not in capsys.readouterr().out, "weights in the cache are checked"


def test_inspect_refuses_by_the_header(hub: Hub, whole_heads: Factory, tmp_path: Path) -> None:
    folder = shutil.copytree(whole_heads("cp"), tmp_path / "other")
    tensor("cp.gate", lambda gate: gate[:1])(folder)
    hub.add("acme/other", folder)
    with pytest.raises(Refused, match=r"tensor 'cp.gate' has shape"):
        command("inspect", "acme/other")
    hub.add("acme/pickled", shutil.copytree(whole_heads("cp"), tmp_path / "p", ignore=lambda *_: ["model.safetensors"]))
    with pytest.raises(Refused, match=r"'acme/pickled@\w+' on the Hub has no model.safetensors"):
        command("inspect", "acme/pickled")
    (tmp_path / "p" / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(Refused, match=r"has a model.safetensors that is truncated or not safetensors"):
        command("inspect", "acme/pickled")


def test_server_refuses_damaged_weights(hub: Hub, readers: Readers, whole_heads: Factory, tmp_path: Path) -> None:
    folder = shutil.copytree(whole_heads("cp"), tmp_path / "damaged")
    tensor("cp.gate", with_value(float("nan")))(folder)
    hub.add("acme/damaged", folder)
    for name in ("model alone", SERVE, "calibrate"):
        assert "not finite" in str(readers.refusal(name, "acme/damaged")), name


def test_a_target_that_is_not_fetched_yet(
    hub: Hub, tiny_model: Factory, tmp_path: Path, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer is fetched, so that the first start refuses what later ones do; weights are only warned about."""
    other = shutil.copytree(tiny_model(), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["renamed"] = tokenizer["model"]["vocab"].pop("<extra_300>")
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    hub.add("acme/target", tiny_model())
    hub.add("acme/other", other)
    for name, refusal in (("acme/target", None), ("acme/other", "the hash of its vocabulary differs")):
        monkeypatch.setattr(readers.model_config, "model", name)
        hub.requests.clear()
        with our_log(logging.INFO) as said:
            line = readers.refusal("model alone", NAME)
        assert line is None if refusal is None else refusal in str(line)
        assert {file for _, repo, file in hub.requests if repo == name} == {"tokenizer.json"}
        assert any("lm_head was not compared" in line for line in said) == (refusal is None)


def test_revisions(hub: Hub, tiny_model: Factory, tmp_path: Path, readers: Readers) -> None:
    hub.add(NAME, heads_folders.make_heads(tmp_path / "v2", "cp", tiny_model(), num_speculative_tokens=1), "v2")
    commit = str(hub.commit(NAME, "v2"))
    assert pinned(f"{NAME}@v2", "config.json") == f"{NAME}@{commit}"
    for name in ("v2", commit):
        assert readers.server(spec_model=f"{NAME}@{name}").num_speculative_tokens == 1
    served_as = served_heads(f"{NAME}@v2", None)
    assert served_as is not None
    assert served_as[0] == str(tiny_model())
    assert served_as[1]["model"] == f"{NAME}@{commit}"
    assert "@v9' has no such revision on the Hub" in str(readers.refusal("model alone", f"{NAME}@v9"))
    with pytest.raises(OptionError, match=r"--revision is the target's; name them as ORGANISATION/NAME@REVISION"):
        served_heads(NAME, None, "v2")


def test_models_of_vllm_are_left_to_it(hub: Hub, tiny_model: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("acme/target", tiny_model())
    assert not is_ours({"model": "acme/target"})
    assert served_heads("acme/target", None) is None
    with pytest.raises(OptionError, match=r"'acme/target@main' has no heads; give a draft model's revision as"):
        is_ours({"model": "acme/target@main"})
    assert "model.safetensors" not in hub.sent
    # Where the Hub does not answer, vLLM asks next and says so; its cache is enough to serve a model.
    asked = len(hub.requests)
    assert served_heads("acme/target", None) is None
    assert len(hub.requests) == asked
    assert served_heads("acme/nobody", None) is None
    # Not by the environment, which vLLM reads once where an engine ran before.
    monkeypatch.setitem(vars(envs), "VLLM_USE_MODELSCOPE", True)
    asked = len(hub.requests)
    assert not is_ours({"model": NAME}) and served_heads(NAME, None) is None
    assert len(hub.requests) == asked


def test_bad_names_and_hubs_that_do_not_answer_are_one_line(
    hub: Hub, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = ("method and model", "model alone", "inspect", "calibrate")

    def refused(name: str, message: str) -> None:
        for command_name in commands:
            line = readers.refusal(command_name, name)
            assert line is not None and message in line, f"{command_name}: {line}"

    refused("acme/nobody", f"is neither a folder nor a repository on {hub.url} that you may read")
    hub.gated = {NAME}
    refused(NAME, "is gated on the Hub: ask for access on its page, and log in (`hf auth login` or HF_TOKEN)")
    hub.gated, hub.broken = set(), True
    refused(NAME, "cannot be reached (Server error '503 Service Unavailable'")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        at(f"http://127.0.0.1:{closed.getsockname()[1]}", monkeypatch)
        refused(NAME, "cannot be reached")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(
        NAME, "config.json is not in the Hub's cache; unset HF_HUB_OFFLINE, or run `hf download acme/tiny-cp` first"
    )


def test_the_cache_is_enough(hub: Hub, readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, and where the Hub is down."""
    folder_of(NAME, "config.json", "model.safetensors")
    hub.broken = True
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("model alone", SERVE, "inspect"):
        assert readers.refusal(name, NAME) is None, name
    assert len(hub.requests) == asked


def test_tokens(hub: Hub, readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private = {NAME}
    assert "log in" in str(readers.refusal("inspect", NAME))
    assert readers.server(spec_model=NAME, hf_token=TOKEN) is not None, "vLLM's --hf-token"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", constants.HF_HUB_CACHE + "-2")
    Path(constants.HF_TOKEN_PATH).write_text(TOKEN)  # as `hf auth login` leaves it
    assert readers.refusal("inspect", NAME) is None
    Path(constants.HF_TOKEN_PATH).unlink()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", constants.HF_HUB_CACHE + "-3")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert readers.refusal("inspect", NAME) is None


def test_train_and_calibrate(hub: Hub, tiny_model: Factory, tmp_path: Path) -> None:
    """A target by its name; heads by theirs are not calibrated, as the Hub's cache is not written."""
    hub.add("acme/target", tiny_model())
    data = str(write_texts(tmp_path / "data.jsonl", patterned_texts(30, 30)))
    heads = tmp_path / "heads"
    train = ["train", "cp", "--model", "acme/target", "--data", data, "--out", str(heads), "--steps", "1"]
    train += ["--batch-size", "1", "--sequence-length", "64", "--precision", "float32", "--license", "mit"]
    assert main(train) == 0
    assert load_config(heads).verifier == "acme/target"
    hub.add("acme/heads", heads)
    with pytest.raises(Refused, match="run `hf download acme/heads --local-dir DIR` and calibrate"):
        command("calibrate", "acme/heads", "--data", data, "--prompts", "4")
    card = (heads / "README.md").read_text()
    assert "license: mit" in card and "base_model: acme/target" in card and "Not calibrated" in card
