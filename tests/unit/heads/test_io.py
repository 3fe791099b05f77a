# SPDX-License-Identifier: Apache-2.0
"""Heads folders that are not right: one line before a model loads, whoever is given them, however they are named."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads_folders
import pytest
import torch
from conftest import Factory
from refusals import SERVE, Damage, Readers, config_text, edited, tensor, with_value
from safetensors.torch import save_file
from vllm import EngineArgs
from vllm.transformers_utils.config import maybe_override_with_speculators
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.config.naming import is_ours
from vllm_ppd.vllm_plugins.config.options import OptionError


@pytest.fixture
def refused_by_all(readers: Readers, whole_heads: Factory, tmp_path: Path) -> Factory:
    """refused_by_all(kind, damage, message): a folder of a kind, damaged."""

    def check(kind: str, damage: Damage, message: str) -> None:
        folder = Path(shutil.copytree(whole_heads(kind), tmp_path / kind))
        damage(folder)
        for name in readers.of:
            line = readers.refusal(name, str(folder))
            assert line is not None, f"{name} takes it"
            assert re.search(message, line), f"{name}: {line}"

    return check


@pytest.mark.parametrize("kind", heads_folders.KINDS)
def test_sound_heads_are_taken(readers: Readers, whole_heads: Factory, kind: str) -> None:
    assert {name: readers.refusal(name, str(whole_heads(kind))) for name in readers.of} == dict.fromkeys(readers.of)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("early", "exit.4.transform"),
        ("cp", "cp.gate"),
        ("cp", "cp.transforms"),
        ("dynamo", "head.3.mlp.up_proj.weight"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(refused_by_all: Factory, kind: str, name: str, value: float) -> None:
    message = f"tensor '{name}' has numbers that are not finite; train or copy the heads again"
    refused_by_all(kind, tensor(name, with_value(value)), message)


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("early", tensor("exit.2.transform", torch.Tensor.long), "'exit.2.transform' is of int64, expected float32"),
        ("cp", tensor("cp.gate", torch.Tensor.long), "'cp.gate' is of int64, expected float32"),
        ("cp", tensor("cp.transforms", lambda t: t.to(torch.complex64)), "'cp.transforms' is of c64, expected float32"),
        ("cp", tensor("cp.gate", torch.Tensor.double), "'cp.gate' is of f64, expected float32"),
        ("cp", tensor("cp.gate", torch.Tensor.bfloat16), "'cp.gate' is of bfloat16, expected float32"),
        ("cp", tensor("token_counts", torch.Tensor.float), "'token_counts' is of float32, expected int32 or int64"),
        ("cp", tensor("token_counts", with_value(-1)), "counts in tensor 'token_counts' are negative"),
        ("dynamo", tensor("cooccurrence.2.keys", torch.Tensor.float), "is of float32, expected int32 or int64"),
        ("dynamo", tensor("cooccurrence.2.keys", lambda t: t.flip(0)), "2.keys are not ascending keys of 2-grams"),
        ("dynamo", tensor("cooccurrence.3.keys", lambda t: t.clamp(max=1)), "3.keys are not ascending keys of 3-grams"),
        ("dynamo", tensor("cooccurrence.2.keys", with_value(1 << 40, 3)), "2.keys are not ascending keys of 2-grams"),
        ("dynamo", tensor("cooccurrence.2.counts", with_value(-1, 0)), "'cooccurrence.2.counts' are negative"),
        ("dynamo", tensor("cooccurrence.2.counts", with_value(1 << 30, 0)), "are negative, or their sum is more than"),
        (
            "dynamo",
            tensor("cooccurrence.unigram", lambda counts: counts[:300]),
            r"'cooccurrence.unigram' has shape \[300\], expected \[320\]",
        ),
        ("dynamo", tensor("cooccurrence.unigram", with_value(-1)), "'cooccurrence.unigram' are negative"),
        ("dynamo", edited("layer_tensors", value={}), "layer_tensors: .* at least 1 item"),
        ("dynamo", edited("layer_tensors", "mlp.up_proj.weight", value="a list"), "valid list"),
        ("dynamo", edited("layer_tensors", "mlp.more.weight", value=[64]), "has 'mlp.more.weight'|has no tensor"),
        ("dynamo", edited("layer_tensors", "mlp.up_proj.weight", value=[0, 64]), "greater than or equal to 1"),
        ("dynamo", edited("layer_tensors", "", value=[64]), "String should match pattern"),
        ("dynamo", edited("layer_tensors", value={"norm": [65]}), "has no tensor of hidden size 64"),
        ("dynamo", edited("cooccurrence_entries", value={"2": 4}), "must have n-grams of orders 2 to 3, or be empty"),
    ],
)  # fmt: skip
def test_dtypes_layers_and_counts(refused_by_all: Factory, kind: str, damage: Damage, message: str) -> None:
    refused_by_all(kind, damage, message)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("dynamo", ("sampling", "k"), 10**9),
        ("dynamo", ("sampling", "k"), 50.0),
        ("dynamo", ("sampling", "k"), True),
        ("dynamo", ("sampling", "blur"), 10**9 + 1),
        ("dynamo", ("sampling", "alpha_c"), float("inf")),
        ("dynamo", ("sampling", "alpha_c"), 1e9),
        ("dynamo", ("sampling", "repetition_penalty"), float("inf")),
        ("dynamo", ("sampling", "repetition_penalty"), float("nan")),
        ("dynamo", ("sampling", "eps_b"), float("nan")),
        ("dynamo", ("tokens",), 10**4000),
        ("early", ("exit_layers",), [2, 4, 4]),
        ("early", ("exit_layers",), [2, 4, 6]),
        ("early", ("exit_layers",), [2, 4, 0]),
        ("early", ("exit_layers",), [True, 4]),
        ("early", ("exit_layers",), list(range(1, 100_000))),
        ("early", ("transformer_layer_config", "num_hidden_layers"), 6.0),
        ("cp", ("rank",), 2.0),
        ("cp", ("rank",), 10**9),
        ("cp", ("token_counts",), 1),
        ("cp", ("transformer_layer_config", "vocab_size"), 10**30),
    ],
)
def test_settings_have_bounds(refused_by_all: Factory, kind: str, path: tuple[str, ...], value: Any) -> None:
    refused_by_all(kind, edited(*path, value=value), f"{path[-1]}.*; correct it, or write the heads again")


def damaged_weights(change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (path := folder / "model.safetensors").write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged_weights(lambda data: data[:-100]), "truncated or not safetensors"),
        (damaged_weights(lambda _: b"\x80\x04 not safetensors"), "truncated or not safetensors"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "a pickle, 'pytorch_model.bin', which is not loaded",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
        (tensor("cp.gate", lambda gate: gate[:, :32]), r"'cp.gate' has shape \[2, 32\], expected \[2, 64\]"),
        (lambda folder: save_file({"x": torch.zeros(2)}, folder / "model.safetensors"), "no tensor 'cp.gate'"),
    ],
)
def test_weights_that_cannot_be_read(refused_by_all: Factory, damage: Damage, message: str) -> None:
    refused_by_all("cp", damage, message)


def test_config_is_in_speculators_format(heads_folder: Factory, tiny_model: Factory) -> None:
    folder = heads_folder()
    model, tokenizer, speculative = maybe_override_with_speculators(str(folder), None, trust_remote_code=False)
    assert model == tokenizer == str(tiny_model())
    assert speculative == {"method": "early", "num_speculative_tokens": 2, "model": str(folder)}


def test_serving_heads_keeps_what_is_asked(whole_heads: Factory) -> None:
    folder = str(whole_heads("early"))
    args = EngineArgs(model=folder, dtype="float32", spec_tokens=1, speculative_config={"method": "paradecode"})
    config = active_config(args.create_engine_config())
    assert config is not None
    assert (config.method, config.num_speculative_tokens, config.exit_layer) == ("paradecode", 1, (4,))
    for asked, message in (
        ({"method": "cp"}, "method='cp' does not support early heads"),
        ({"model": "x/y"}, "another model"),
    ):
        with pytest.raises(OptionError, match=message):
            EngineArgs(model=folder, speculative_config=asked).create_engine_config()


METHODS = ("speculators_config", "proposal_methods")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (config_text(b""), "config.json .* is not valid JSON .*; write"),
        (config_text(b"[]"), r"config.json .* holds \[\], not an object; write"),
        (config_text(b"null"), "config.json .* holds None, not an object; write"),
        (config_text(b"\xef\xbb\xbf{}"), "is not valid JSON .*; write"),
        (config_text('{"a": "ä"}'.encode("latin-1")), r"is not valid JSON \(invalid unicode"),
        (config_text('{"a": 1}'.encode("utf-16")), "is not valid JSON .*; write"),
        (config_text(b'{"a": ' + b"9" * 5000 + b"}"), r"is not valid JSON \(number out of range"),
        (config_text(b"[" * 1500 + b"]" * 1500), r"is not valid JSON \(recursion limit exceeded"),
        (edited("more", value="a" * (1 << 20)), "has 1,04[0-9,]* bytes, more"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (edited("speculators_model_type", value=["cp"]), r"holds heads of kind \['cp'\]; expected"),
        (edited("speculators_model_type", value={}), "holds heads of kind {}; expected kind"),
        (edited("speculators_model_type", value="x" * 5000), "holds heads of kind 'xxx"),
        (edited("speculators_model_type", value="c\n\x1b[1mp"), r"holds heads of kind 'c\\n\\x1b\[1mp'"),
        (edited("speculators_model_type", value=...), "holds heads of kind None"),
        (edited(*METHODS, value=[]), "proposal_methods.0.speculative_tokens: Field required"),
        (edited(*METHODS, value={}), "proposal_methods.0.speculative_tokens: Field required"),
        (edited(*METHODS, value=["greedy"]), "proposal_methods.0.speculative_tokens: Field required"),
        (edited(*METHODS, 0, "speculative_tokens", value=...), "speculative_tokens: Field required"),
        (edited("speculators_config", "verifier", value=[]), "verifier.name_or_path: Field required"),
        (edited("speculators_config", "verifier", "name_or_path", value=""), "name_or_path: String should have at"),
        (edited("transformer_layer_config", value=None), "transformer_layer_config: Input should be"),
    ],
)  # fmt: skip
def test_config_of_another_shape(refused_by_all: Factory, damage: Damage, message: str) -> None:
    refused_by_all("cp", damage, message)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize(
    ("put", "message"),
    [
        (Path.mkdir, "is not a regular file"),
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.symlink_to(path), "cannot be opened"),
        (lambda path: path.symlink_to("nowhere"), "has no"),
        (Path.touch, "is not valid JSON|is truncated or not safetensors"),
    ],
)
def test_files_that_are_not_regular(
    refused_by_all: Factory, name: str, put: Callable[[Path], Any], message: str
) -> None:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        put(folder / name)

    refused_by_all("cp", damage, f"{name}.*({message})|({message}) {name}")


def test_names_that_are_no_folder(readers: Readers, whole_heads: Factory) -> None:
    for folder, message in (
        ("/" + "a" * 5000, r"'/aaa.*aaa'"),
        ("a/" * 2500, r"'a/a/.*a/'"),
        ("./nowhere", "'./nowhere' does not exist"),
        ("nope", "'nope' (is neither a method|does not exist)"),
        ("", "'' is empty|folder is empty"),
        (str(whole_heads("cp") / "config.json"), "is a file"),
        ("nul\0", r"'nul\\x00'"),
    ):
        for name in readers.of.keys() - {SERVE}:
            line = readers.refusal(name, folder)
            assert line is not None, f"{name} takes {folder[:20]}"
            assert re.search(message, line), f"{name}: {line}"
    line = readers.refusal(SERVE, "/" + "a" * 5000)
    assert line is not None
    assert re.search("'/aaa.*aaa' cannot be served: its name is too long", line)


def test_what_is_left_to_vllm(tmp_path: Path) -> None:
    """Its own methods, whatever their model; classes of the user's own, folders of its own kinds; see test_hub.py."""
    for asked in (
        {"method": "eagle3", "model": "nope"}, {"method": "draft_model", "model": "gpt2"},
        {"method": "ngram"}, {"model": "ngram"}, {"model": "package.module.Proposer"}, {"model": "s3://bucket/model"},
        {},
    ):  # fmt: skip
        assert not is_ours(asked), asked
    for content in ({"model_type": "llama"}, {"speculators_model_type": "eagle3", "speculators_config": {}}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert not is_ours({"model": str(tmp_path)})
    with pytest.raises(OptionError, match=r"method=\['ppd'\] is not a name; give a string, such as 'ppd'"):
        is_ours({"method": ["ppd"]})


def test_one_line_at_the_command_line(tiny_model: Factory, whole_heads: Factory, tmp_path: Path) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    folder = shutil.copytree(whole_heads("cp"), tmp_path / "cp")
    tensor("cp.gate", with_value(float("nan")))(folder)
    for flags in (["--model", str(tiny_model()), "--speculative-model", str(folder)], ["--model", str(folder)]):
        args = EngineArgs.from_cli_args(parser.parse_args([*flags, "--dtype", "float32"]))
        with pytest.raises(HeadsError, match="not finite"):
            args.create_engine_config()
