# SPDX-License-Identifier: Apache-2.0
"""`ppd train`: heads that learn, runs that continue, and input that is refused; on tiny models of several families."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.checkpointing
import pytest
import tiny
import torch
from conftest import patterned_texts, write_texts
from safetensors import SafetensorError
from safetensors.torch import load_file

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.io import check_folder, kind_of, load_config
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.training import loop
from vllm_ppd.heads.training import recipe as training_recipe
from vllm_ppd.heads.training.checkpoint import FACTS, STATE, WORK, read_facts
from vllm_ppd.heads.training.evaluation import Evaluation
from vllm_ppd.heads.training.provenance import provenance_of
from vllm_ppd.vllm_plugins.cli.main import main

Train = Callable[..., Path]
COMMON = {
    "steps": 12, "sequence_length": 64, "batch_size": 4, "precision": "float32", "stored_dtype": "float32",
    "device": "cpu", "held_out": 0.1, "evaluation_tokens": 2048, "learning_rate": 3e-3,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "early": {},
    "cp": {"rank": 2, "positions": 3, "num_speculative_tokens": 2},
    "dynamo": {"tokens": 3, "mask_entries": 50},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "data.jsonl", patterned_texts(120, 6))


@pytest.fixture
def train(tiny_model: Callable[..., Path], data: Path, tmp_path: Path) -> Train:
    """train(kind, family, **options): a heads folder."""

    def run(kind: str = "early", family: str | Path = "llama", out: str = "heads", **options: Any) -> Path:
        model = family if isinstance(family, Path) else tiny_model(family)
        given = {**COMMON, **SMALL[kind], **options, "model": str(model), "data": (str(data),)}
        loop.train(KINDS[kind].options(**given, out=str(tmp_path / out)))
        return tmp_path / out

    return run


def losses(folder: Path, key: str) -> tuple[float, float]:
    """A figure on held-out text before and after."""
    facts = json.loads((folder / "provenance.json").read_text())
    found = []
    for when in ("before", "after"):
        value: Any = facts[f"held_out_{when}"]
        for part in key.split("/"):
            value = value[part]
        found.append(value)
    return found[0], found[1]


FIGURES = {"early": "exit 3/kl_nats", "cp": "distilled_nats", "dynamo": "head 2 distilled_nats"}


# Qwen 3 has tied embeddings below.
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.full), "gpt_neox"])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_learn_and_the_target_stays_what_it_was(
    train: Train, tiny_model: Callable[..., Path], kind: str, family: str
) -> None:
    weights = {p.name: p.read_bytes() for p in tiny_model(family).iterdir()}
    folder = train(kind, family)
    assert {p.name: p.read_bytes() for p in tiny_model(family).iterdir()} == weights
    before, after = losses(folder, FIGURES[kind])
    assert after < before
    assert kind_of(folder) == kind
    assert check_folder(folder).kind == kind
    files = ["README.md", "config.json", "curve.jsonl", "model.safetensors", "provenance.json"]
    assert sorted(p.name for p in folder.iterdir()) == files
    assert [file.name for file in provenance_of(folder).data_files] == ["data.jsonl"]


@pytest.mark.parametrize("kind", KINDS)
def test_tied_embeddings(train: Train, tmp_path: Path, kind: str) -> None:
    tied = tiny.make_model(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    before, after = losses(train(kind, tied), FIGURES[kind])
    assert after < before


@pytest.mark.parametrize(
    ("kind", "options", "figure"),
    [
        ("early", {"head": "classifier"}, "exit 3/kl_nats"),
        ("early", {"head": "classifier", "loss": "ce"}, "exit 3/ce_nats"),
        ("early", {"loss": "ce", "exit_layers": "2,4"}, "exit 4/ce_nats"),
        ("cp", {"factorised": False, "condition": "none", "distillation": 0.0}, "joint_nats"),
        ("cp", {"factorised": False, "condition": "none"}, "distilled_nats"),
        ("cp", {"rank": 1, "condition": "none"}, "distilled_nats"),
        ("cp", {"condition": "chain", "distillation": 0.5, "train_vocab_size": 64}, "joint_nats"),
        ("cp", {"start": "identity", "position_share": 0.5, "distillation": 0.0}, "joint_nats"),
        ("dynamo", {"start": "random", "tokens": 2, "num_speculative_tokens": 1, "distillation": 0.0}, "head 2 nats"),
        ("early", {"accumulation": 2}, "exit 3/kl_nats"),
        ("early", {"position_share": 0.5}, "exit 3/kl_nats"),
        ("dynamo", {"position_share": 0.5}, "head 2 distilled_nats"),
        ("early", {"precision": "bfloat16"}, "exit 3/kl_nats"),
    ],
)
def test_variants_learn(train: Train, kind: str, options: dict[str, Any], figure: str) -> None:
    before, after = losses(train(kind, **options), figure)
    assert after < before


@pytest.mark.parametrize(
    ("kind", "options", "figure"),
    [
        ("dynamo", {"stem_learning_rate": 1e-5}, "head 1 nats"),
        ("cp", {"condition": "none", "distillation": 0.0}, "next_token_nats"),
        ("cp", {"condition": "none", "distillation": 0.0, "factorised": False}, "joint_nats"),
        ("cp", {"base_start": "random", "start": "identity", "seed": 7}, "next_token_nats"),
    ],
)
def test_full_recipe_moves_the_base_model_and_names_it(
    train: Train, tiny_model: Callable[..., Path], kind: str, options: dict[str, Any], figure: str
) -> None:
    folder = train(kind, recipe="full", base_learning_rate=1e-3, **options)
    config = load_config(folder)
    assert config.verifier == str((folder / "base").resolve())
    assert check_folder(folder).kind == kind
    ours, theirs = load_file(folder / "base" / "model.safetensors"), load_file(tiny_model() / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    moved = float((ours[name] - theirs[name]).norm() / theirs[name].norm())
    assert moved > 1 if "base_start" in options else 0 < moved < 0.5
    assert losses(folder, figure)[1] < losses(folder, figure)[0]


def test_heads_pull_on_the_stem_is_scaled(train: Train, tiny_model: Callable[..., Path]) -> None:
    """LR_MB = 0: the base model moves as plain CLM training would, whatever the heads say."""
    one = train("dynamo", recipe="full", base_learning_rate=1e-4, stem_learning_rate=0.0, out="one")
    two = train(
        "dynamo", recipe="full", base_learning_rate=1e-4, stem_learning_rate=0.0, out="two",
        start="random",
    )  # fmt: skip
    three = train("dynamo", recipe="full", base_learning_rate=1e-4, stem_learning_rate=1e-4, out="three")
    weights = [load_file(folder / "base" / "model.safetensors") for folder in (one, two, three)]
    name = "model.layers.2.mlp.down_proj.weight"
    torch.testing.assert_close(weights[0][name], weights[1][name])
    assert not torch.allclose(weights[0][name], weights[2][name], atol=1e-7)


def stop_at(monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Press Ctrl-C in the count-th computation of a loss; returns the list of all of them."""
    steps: list[int] = []
    compute = loop._Run._loss_and_gradient

    def counted(self: Any, *args: Any) -> Any:
        steps.append(self.facts.step)
        if len(steps) == count:
            os.kill(os.getpid(), signal.SIGINT)
        return compute(self, *args)

    monkeypatch.setattr(loop._Run, "_loss_and_gradient", counted)
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_run_continues_to_the_same_heads(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    whole = train(kind, out="whole")
    steps = stop_at(monkeypatch, 6)
    with pytest.raises(loop.Stopped, match="stopped at step 5 of 12"):
        train(kind, out="parts")
    assert not (tmp_path / "parts" / "config.json").exists()
    parts = train(kind, out="parts")
    assert len(steps) == 13, "the steps before the stop are not done again"
    ours, theirs = load_file(parts / "model.safetensors"), load_file(whole / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=1e-5)


def command(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        "train", "early", "--model", str(model), "--data", str(data), "--out", str(out), "--device", "cpu",
        "--sequence-length", "64", "--batch-size", "4", "--precision", "float32", "--held-out", "0.1", *more,
    ]  # fmt: skip


@pytest.mark.full
def test_killed_run_continues(tiny_model: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    """kill -9 at any moment, here in the middle of saving after every step."""
    out = tmp_path / "heads"
    argv = command(tiny_model(), data, out, "--steps", "400", "--save-every", "1")
    state = out / WORK / STATE
    run = subprocess.Popen(
        [sys.executable, "-m", "vllm_ppd.vllm_plugins.cli.main", *argv], stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    deadline = time.monotonic() + 120
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    run.kill()
    run.wait()
    facts = read_facts(state)
    assert facts is not None and 0 < facts.step < 400, "killed too early or too late to tell"
    assert main(command(tiny_model(), data, out, "--steps", "400", "--save-every", "1")) == 0
    check_folder(out)


def test_diverging_loss_stops_and_keeps_the_last_good(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 6)
    with pytest.raises(loop.Stopped):
        train()
    state = tmp_path / "heads" / WORK / STATE
    good = (state / FACTS).read_bytes()
    with pytest.raises(TrainingError, match=r"diverged at step 6.*checkpoint of step 5 is kept.*lower --learning-rate"):
        train(learning_rate=1e9, gradient_clip=1.0, save_every=1)
    assert (state / FACTS).read_bytes() == good
    train(learning_rate=1e-4, save_every=1)  # as the message says


def test_full_disk_loses_nothing(
    tiny_model: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    argv = command(tiny_model(), data, tmp_path / "heads", "--steps", "6", "--save-every", "2")
    real, calls = accelerate.checkpointing.save, 0

    def full(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:  # the weights of the second checkpoint
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        real(*args, **kwargs)

    monkeypatch.setattr(accelerate.checkpointing, "save", full)
    assert main(argv) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("ppd: error: the disk is full")
    facts = read_facts(tmp_path / "heads" / WORK / STATE)
    assert facts is not None and facts.step == 2
    assert not list((tmp_path / "heads" / WORK).glob("*.part"))
    assert main(argv) == 0


BAD = [
    (("--steps", "0"), "--steps 0: input should be greater than or equal to 1"),
    (("--exit-layers", "6"), "--exit-layers 6 is outside 1..5: this model has 6 layers"),
    (("--exit-layers", "a"), "--exit-layers a: input should be a valid integer"),
    (("--sequence-length", "4096"), "--sequence-length 4096 is over the model's 512 positions"),
    (("--batch-size", "3", "--accumulation", "2"), "--batch-size 3 does not divide"),
    (("--model", "/nowhere"), "cannot load model '/nowhere'"),
    (("--data", "/nowhere.jsonl"), "data file '/nowhere.jsonl' does not exist"),
    (("--device", "cuda:7"), "no CUDA device is available"),
    (("--device", "abacus"), "--device abacus"),
]


@pytest.mark.parametrize(("more", "message"), BAD, ids=[" ".join(more) for more, _ in BAD])
def test_bad_input_is_one_line(
    tiny_model: Callable[..., Path], data: Path, tmp_path: Path, capsys: Any, more: tuple[str, ...], message: str
) -> None:
    if "cuda" in more[-1] and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(command(tiny_model(), data, tmp_path / "heads", *more)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert not (tmp_path / "heads" / "config.json").exists()


def test_rank_zero_is_refused(tiny_model: Callable[..., Path], data: Path, tmp_path: Path, capsys: Any) -> None:
    argv = command(tiny_model(), data, tmp_path / "heads", "--rank", "0")
    assert main([argv[0], "cp", *argv[2:]]) == 2
    assert "--rank 0: input should be greater than or equal to 1" in capsys.readouterr().err


def test_folder_of_something_else_is_kept(train: Train, tmp_path: Path) -> None:
    folder = train()
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(TrainingError, match="already holds heads"):
        train("cp")
    assert (folder / "model.safetensors").read_bytes() == before


def test_unfinished_run_of_other_options_is_kept(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_recipe, "save_heads", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation(step=0, loss=1.0, figures={}))
    with pytest.raises(OSError, match="gone"):
        train()
    with pytest.raises(TrainingError, match="holds an unfinished run with batch_size=4, and this one has 2"):
        train(batch_size=2)


def test_flags_are_the_fields(capsys: Any) -> None:
    for kind, config in KINDS.items():
        with pytest.raises(SystemExit):
            main(["train", kind, "--help"])
        text = capsys.readouterr().out
        for name in config.options.model_fields:
            assert "--" + name.replace("_", "-") in text


def test_inspect_says_whether_it_loads(train: Train, tiny_model: Callable[..., Path], capsys: Any) -> None:
    folder = train()
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "early (EarlyHeads)" in text
    assert f"will load: yes, with {tiny_model()}" in text
    assert main(["inspect", str(folder), "--model", str(tiny_model("qwen2"))]) == 2
    assert "hidden_size is 64 there and 128 in this model" in capsys.readouterr().err
    assert main(["inspect", "/nowhere"]) == 2


def test_env_tells_versions(capsys: Any) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text
    assert re.search(r"vLLM supported +yes", text)
    assert re.search(r"plugin +(registered|switched off)", text)


def test_two_processes_train_what_one_does(tiny_model: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    """torchrun with accelerate: halves of every batch, averaged gradients; one summary."""
    command = [
        "train", "early", "--model", str(tiny_model()), "--data", str(data), "--steps", "6", "--batch-size", "4",
        "--sequence-length", "64", "--precision", "float32", "--stored-dtype", "float32", "--device", "cpu",
        "--held-out", "0.1",
    ]  # fmt: skip
    alone, several = tmp_path / "alone", tmp_path / "several"
    assert main([*command, "--out", str(alone)]) == 0
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m",
         "vllm_ppd.vllm_plugins.cli.main", *command, "--out", str(several)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("wrote") == 1
    expected = load_file(alone / "model.safetensors")
    for name, tensor in load_file(several / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)
