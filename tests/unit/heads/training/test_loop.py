# SPDX-License-Identifier: Apache-2.0
"""`ppd train`: heads that learn, runs that continue, and input that is refused; on tiny models of several families."""

import json
import os
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
from conftest import Factory
from records import write
from safetensors import SafetensorError
from safetensors.torch import load_file

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.io import check_folder, kind_of, load_config
from vllm_ppd.heads.kinds import KINDS, recipe_of
from vllm_ppd.heads.training import loop
from vllm_ppd.heads.training import recipe as training_recipe
from vllm_ppd.heads.training.checkpoint import FACTS, STATE, WORK, read_facts
from vllm_ppd.heads.training.evaluation import Evaluation
from vllm_ppd.heads.training.provenance import provenance_of
from vllm_ppd.vllm_plugins.cli.main import main

Train = Callable[..., Path]
Command = Callable[..., list[str]]


def losses(folder: Path, key: str) -> tuple[float, float]:
    """A figure on held-out text before the first step and after the last, whichever of these weights are better."""
    points = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    evaluated = [point["held_out"] for point in points if "held_out" in point]
    figures = []
    for value in (evaluated[0], evaluated[-1]):
        for part in key.split("/"):
            value = value[part]
        figures.append(value)
    return figures[0], figures[1]


FIGURES = {
    "early": "exit 3/kl_nats", "cp": "distilled_nats", "dynamo": "head 2 distilled_nats", "recurrent": "distilled_nats",
}  # fmt: skip


# Qwen 3 has tied embeddings below.
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.full), "gpt_neox"])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_learn_and_the_target_stays_what_it_was(
    train: Train, tiny_model: Factory, kind: str, family: str
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


SHORT: list[tuple[str, dict[str, Any], Any]] = [
    ("early", {}, None),
    ("cp", {"positions": 2, "num_speculative_tokens": 1}, None),
    ("cp", {}, "no window has a response of 3 tokens in a row, which a joint of 3 tokens needs to learn; .* --pos"),
    ("recurrent", {}, "no window has a response of 3 tokens in a row.*a smaller --num-speculative-tokens"),
    ("dynamo", {"distillation": 0.0}, {"head 1 nats", "head 2 nats"}),
]


@pytest.mark.parametrize(("kind", "options", "expected"), SHORT, ids=[f"{kind}{len(more)}" for kind, more, _ in SHORT])
def test_answers_of_one_token(
    train: Train, tmp_path: Path, capsys: Any, kind: str, options: dict[str, Any], expected: Any
) -> None:
    """Labels, with the end of text: heads that look further ahead say so."""
    labels = write(tmp_path / "l.jsonl", *({"prompt": f"Is {i} even? ", "completion": "yn"[i % 2]} for i in range(200)))
    if isinstance(expected, str):
        with pytest.raises(TrainingError, match=expected):
            train(kind, data=(labels,), **options)
        return
    folder = train(kind, data=(labels,), steps=2, **options)
    facts = json.loads((folder / "provenance.json").read_text())
    said = capsys.readouterr().err
    if kind == "dynamo":
        assert set(facts["held_out_after"]) == expected
        assert "head 3 is not trained: no response has 3 tokens in a row; give longer responses, or a" in said
    assert check_folder(folder).kind == kind


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_windows_without_a_response(train: Train, tmp_path: Path, capsys: Any, kind: str) -> None:
    """The last weights are written, also with --patience, and the run says what is missing."""
    long = ({"prompt": f"{i} " + "x" * 300, "completion": "yes, it is so"} for i in range(100))
    data = (write(tmp_path / "l.jsonl", *long),)
    folder = train(kind, data=data, evaluation_tokens=64, steps=4, evaluate_every=1, patience=1)
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["held_out_before"] == facts["held_out_after"] == {}
    assert facts["held_out_after_step"] == facts["steps"] == 4
    assert "is not evaluated: no held-out response has" in capsys.readouterr().err


def test_steps_without_a_response_are_not_a_loss_of_zero(train: Train, tmp_path: Path) -> None:
    """From which every later loss would be a divergence."""
    records = [{"prompt": f"{i} " + "x" * 600, "completion": "y"} for i in range(60)]
    data = (write(tmp_path / "l.jsonl", *records),)
    folder = train("early", data=data, steps=40, batch_size=1, evaluation_tokens=64, learning_rate=1e-6)
    points = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    losses = [point["loss"] for point in points if "loss" in point]
    assert 0 < len(losses) < 40 and min(losses) > 0


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
        ("cp", {"condition": "recurrent", "distillation": 0.5, "train_vocab_size": 64}, "joint_nats"),
        ("cp", {"start": "identity", "position_share": 0.5, "distillation": 0.0}, "joint_nats"),
        ("recurrent", {"start": "random", "inner_size": 48, "tie_weights": False}, "distilled_nats"),
        ("recurrent", {"scale_input": True, "distillation": 0.5, "train_vocab_size": 64}, "joint_nats"),
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
    train: Train, tiny_model: Factory, kind: str, options: dict[str, Any], figure: str
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


def test_a_target_that_is_trained_is_judged_by_its_loss(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained one's guesses are easily drafted."""
    real, seen = loop.evaluate, []
    monkeypatch.setattr(loop, "evaluate", lambda *args: seen.append(real(*args)) or seen[-1])
    train("dynamo", recipe="full", base_learning_rate=1e-3, steps=2)
    train("dynamo", out="frozen", steps=1)
    assert [evaluation.accepted is None for evaluation in seen] == [True, True, False, False]
    assert all("accepted_a_step" in evaluation.figures for evaluation in seen)


def test_four_tokens_of_a_large_vocabulary(train: Train, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "model", vocab_size=128_256, num_hidden_layers=2)
    folder = train("dynamo", model, tokens=4, steps=2, evaluation_tokens=64)
    assert check_folder(folder).kind == "dynamo"
    assert load_file(folder / "model.safetensors")["cooccurrence.4.keys"].numel() == 50


def test_heads_pull_on_the_stem_is_scaled(train: Train, tiny_model: Factory) -> None:
    """LR_MB = 0: the base model moves as plain CLM training would, whatever the heads say."""
    settings: dict[str, Any] = {"recipe": "full", "base_learning_rate": 1e-4}
    folders = [
        train("dynamo", stem_learning_rate=0.0, out="copied", **settings),
        train("dynamo", stem_learning_rate=0.0, out="random", start="random", **settings),
        train("dynamo", stem_learning_rate=1e-4, out="pulled", **settings),
    ]
    weights = [load_file(folder / "base" / "model.safetensors") for folder in folders]
    name = "model.layers.2.mlp.down_proj.weight"
    torch.testing.assert_close(weights[0][name], weights[1][name])
    assert not torch.allclose(weights[0][name], weights[2][name], atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_run_continues_to_the_same_heads(train: Train, tmp_path: Path, stop_at: Factory, kind: str) -> None:
    whole = train(kind, out="whole")
    batches = stop_at(6)
    with pytest.raises(loop.Stopped, match="stopped at step 5 of 12"):
        train(kind, out="parts")
    assert not (tmp_path / "parts" / "config.json").exists()
    parts = train(kind, out="parts")
    # The last one shows that the weights after the last step are good.
    assert len(batches) == 14, "the steps before the stop are not done again"
    ours, theirs = load_file(parts / "model.safetensors"), load_file(whole / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=1e-5)


def test_diverging_loss_stops_and_keeps_the_last_good(train: Train, tmp_path: Path, stop_at: Factory) -> None:
    stop_at(6)
    with pytest.raises(loop.Stopped):
        train()
    state = tmp_path / "heads" / WORK / STATE
    good = (state / FACTS).read_bytes()
    with pytest.raises(TrainingError, match=r"diverged at step 6.*checkpoint of step 5 is kept.*lower --learning-rate"):
        train(learning_rate=1e9, gradient_clip=1.0, save_every=1)
    assert (state / FACTS).read_bytes() == good
    train(learning_rate=1e-4, save_every=1)  # as the message says


def test_full_disk_loses_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    argv = command("--steps", "6", "--save-every", "2")
    real, calls = accelerate.checkpointing.save, 0

    def full(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:  # the weights of the second checkpoint; the first weights are the best so far
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
    (("--rank", "0"), "--rank 0: input should be greater than or equal to 1"),
    (("--exit-layers", "6"), "--exit-layers 6 is outside 1..5: this model has 6 layers"),
    (("--exit-layers", "a"), "--exit-layers a: input should be a valid integer"),
    (("--sequence-length", "4096"), "--sequence-length 4096 is more than the model's 512 positions"),
    (("--batch-size", "3", "--accumulation", "2"), "--batch-size 3 is not divisible"),
    (("--model", "/nowhere"), "cannot load model '/nowhere'"),
    (("--data", "/nowhere.jsonl"), "data file '/nowhere.jsonl' does not exist"),
    (("--device", "cuda:7"), "no CUDA devices are available; use another, or --device cpu"),
    (("--device", "abacus"), "--device abacus"),
]


@pytest.mark.parametrize(("more", "message"), BAD, ids=[" ".join(more) for more, _ in BAD])
def test_bad_input_is_one_line(
    command: Command, tmp_path: Path, capsys: Any, more: tuple[str, ...], message: str
) -> None:
    if "cuda" in more[-1] and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(command(*more, kind="cp" if more[0] == "--rank" else "early")) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert not (tmp_path / "heads" / "config.json").exists()


def test_heads_that_could_not_be_written_are_refused_at_the_start(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_of("early"), "config", lambda self: KINDS["early"].model_validate({}))
    monkeypatch.setattr(loop, "evaluate", None)
    with pytest.raises(TrainingError, match="no heads of this model can be written with these options: "):
        train()
    with pytest.raises(TrainingError, match="--states-cache needs a frozen target, but --recipe full trains it"):
        train("dynamo", recipe="full", states_cache="there")


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
    with pytest.raises(TrainingError, match="holds an unfinished run with batch_size=4, but this run has 2"):
        train(batch_size=2)


def in_two_processes(words: list[str], folder: Path) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "vllm_ppd.vllm_plugins.cli.main"]
    return subprocess.Popen(
        [sys.executable, *launch, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_two_processes_train_what_one_does(command: Command, tmp_path: Path) -> None:
    """torchrun with accelerate: halves of every batch, averaged gradients; one summary."""
    more = ("--steps", "6", "--stored-dtype", "float32")
    assert main(command(*more, out="alone")) == 0
    run = in_two_processes(command(*more, out="several"), tmp_path)
    text, errors = run.communicate()
    assert run.returncode == 0, errors[-2000:]
    assert text.count("wrote") == 1
    expected = load_file(tmp_path / "alone" / "model.safetensors")
    # AdamW divides a gradient by its own size: where it is tiny, another order of sums moves a weight by up to a step.
    for name, tensor in load_file(tmp_path / "several" / "model.safetensors").items():
        difference = (tensor - expected[name]).abs()
        assert (difference > 1e-4).float().mean() < 0.01, name
        assert difference.max() < 5e-3, name


@pytest.mark.full
def test_two_processes_stop_at_the_same_step_and_continue(command: Command, tmp_path: Path) -> None:
    """A signal reaches them at different steps; only they know the optimiser's state, so they must agree."""
    more = ("--steps", "60", "--stored-dtype", "float32", "--evaluation-tokens", "64")
    whole = in_two_processes(command(*more, out="whole"), tmp_path)
    assert whole.communicate() and whole.returncode == 0
    run = in_two_processes(command(*more, out="parts"), tmp_path)
    curve, deadline = tmp_path / "parts" / "curve.jsonl", time.monotonic() + 300
    while not (curve.is_file() and '"loss"' in curve.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    run.communicate()
    facts = read_facts(tmp_path / "parts" / WORK / STATE)
    assert facts is not None and 0 < facts.step < 60, "stopped too early or too late to tell"
    assert main(command(*more, out="parts")) == 2, "one process does not continue what two began"
    again = in_two_processes(command(*more, out="parts"), tmp_path)
    assert again.communicate() and again.returncode == 0
    ours, theirs = (load_file(tmp_path / out / "model.safetensors") for out in ("parts", "whole"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_ppds_recipe_is_the_default_of_its_head_and_loss() -> None:
    """PPD, Table 4, unless the user says otherwise."""
    make: Any = KINDS["early"].options
    model = {"model": "m", "data": ("d",), "out": "o"}
    published = make(**model, head="classifier", loss="ce")
    assert (published.learning_rate, published.batch_size, published.epochs) == (2e-5, 128, 3.0)
    assert make(**model, head="classifier", loss="ce", learning_rate=1e-3).learning_rate == 1e-3
    assert make(**model, head="classifier").learning_rate == make(**model).learning_rate == 5e-3
