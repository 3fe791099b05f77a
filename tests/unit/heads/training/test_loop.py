# SPDX-License-Identifier: Apache-2.0
"""`ppd train`: heads that learn, runs that continue, and input that is refused; on tiny
models of several families.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import Factory, full_but
from records import read, write
from safetensors.torch import load_file

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.folder import check_folder, kind_of, load_config
from vllm_ppd.heads.kinds import KINDS, recipe_of
from vllm_ppd.heads.provenance import provenance_of
from vllm_ppd.heads.training import loop
from vllm_ppd.vllm_plugins.cli.main import main


def curve(
    folder: Path,
    key: str,
) -> list[Any]:
    """The values of a key in the lines that have it."""
    points = read(folder / loop.CURVE)
    return [point[key] for point in points if key in point]


def assert_learned(
    folder: Path,
    key: str,
) -> None:
    """A figure on held-out text is lower after the last step than before the first,
    whichever of these weights are better.
    """
    figures = curve(folder, "held_out")
    for part in key.split("/"):
        figures = [figure[part] for figure in figures]
    assert figures[-1] < figures[0]


FIGURES = {
    "early": "exit 2/kl_nats",
    "cp": "distilled_nats",
    "dynamo": "head 2 distilled_nats",
    "recurrent": "distilled_nats",
}


# Qwen 3 has tied embeddings below.
@pytest.mark.parametrize(
    "family", full_but({"llama"}, ["llama", "qwen3", "gpt_neox"])
)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_learn_and_the_target_stays_what_it_was(
    train: Factory, tiny_model: Factory, kind: str, family: str
) -> None:
    weights = {p.name: p.read_bytes() for p in tiny_model(family).iterdir()}
    folder = train(kind, family)
    assert {
        p.name: p.read_bytes() for p in tiny_model(family).iterdir()
    } == weights
    assert_learned(folder, FIGURES[kind])
    assert kind_of(folder) == kind
    assert check_folder(folder).kind == kind
    files = [
        "README.md",
        "config.json",
        "curve.jsonl",
        "model.safetensors",
        "provenance.json",
    ]
    assert sorted(p.name for p in folder.iterdir()) == files
    assert [f["name"] for f in provenance_of(folder).data_files] == ["data.jsonl"]


def test_answers_that_are_too_short(train: Factory, tmp_path: Path) -> None:
    """To learn from, or to evaluate with. Then the last weights are written, also with
    --patience.
    """
    file = tmp_path / "l.jsonl"
    message = (
        "no window has a response of 2 tokens in a row, which these heads need"
    )
    cut_off = {"token_ids": [66], "finish_reason": "length"}
    prompts = [{"prompt_token_ids": [40 + i, 41]} for i in range(200)]
    data = write(file, *[prompt | cut_off for prompt in prompts])
    with pytest.raises(TrainingError, match=message):
        train("cp", data=(data,))
    with pytest.raises(TrainingError, match="8 is not from 16 to the model's"):
        train("cp", train_vocab_size=8)
    answer = {"completion": "yes, it is so"}
    write(file, *[{"prompt": f"{i} " + "x" * 300} | answer for i in range(100)])
    settings = {
        "evaluation_tokens": 64,
        "steps": 4,
        "evaluate_every": 1,
        "patience": 1,
    }
    folder = train("cp", data=(data,), **settings)
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["held_out_before"] == facts["held_out_after"] == {}
    assert facts["steps"] == 4


def test_token_heads_of_a_large_vocabulary(
    train: Factory, made_once: Factory
) -> None:
    """T4 with Llama 3's, whose n-grams have keys of the most frequent tokens."""
    sizes = {"vocab_size": 128_256, "hidden_size": 32, "num_hidden_layers": 2}
    model = made_once(
        "large-vocabulary", lambda folder: tiny.make_model(folder, **sizes)
    )
    small = {"steps": 2, "batch_size": 1, "evaluation_tokens": 64}
    folder = train(
        "dynamo",
        model,
        num_speculative_tokens=3,
        **small,
    )
    entries = check_folder(folder).cooccurrence_entries
    assert set(entries) == {2, 3, 4} and min(entries.values()) > 20


def test_steps_without_a_response_are_not_a_loss_of_zero(
    train: Factory, tmp_path: Path
) -> None:
    records = [
        {"prompt": f"{i} " + "x" * 600, "completion": "y"} for i in range(60)
    ]
    data = (write(tmp_path / "l.jsonl", *records),)
    folder = train(
        "early",
        data=data,
        steps=40,
        batch_size=1,
        evaluation_tokens=64,
        head="classifier",
    )
    losses = curve(folder, "loss")
    assert 0 < len(losses) < 40 and min(losses) > 0


@pytest.mark.parametrize(
    ("kind", "options", "figure"),
    [
        (
            "early",
            {"head": "classifier", "learning_rate": 3e-3},
            "exit 2/ce_nats",
        ),
        ("early", {"accumulation": 2, "position_share": 0.5}, "exit 2/kl_nats"),
        ("early", {"dtype": "bfloat16"}, "exit 2/kl_nats"),
        (
            "cp",
            {"factorized": False, "condition": "none", "distillation": 0.0},
            "joint_nats",
        ),
        (
            "cp",
            {
                "condition": "recurrent",
                "distillation": 0.5,
                "train_vocab_size": 64,
            },
            "joint_nats",
        ),
        (
            "cp",
            {"start": "identity", "position_share": 0.5, "distillation": 0.0},
            "joint_nats",
        ),
        (
            "recurrent",
            {"start": "random", "inner_size": 48, "tie_weights": False},
            "distilled_nats",
        ),
        (
            "dynamo",
            {
                "start": "random",
                "distillation": 0.0,
                "num_speculative_tokens": 1,
            },
            "head 2 nats",
        ),
    ],
)
def test_variants_learn(
    train: Factory, kind: str, options: dict[str, Any], figure: str
) -> None:
    assert_learned(train(kind, **options), figure)


@pytest.mark.parametrize(
    ("kind", "options", "figure"),
    [
        ("dynamo", {"stem_learning_rate": 1e-5}, "head 1 nats"),
        ("cp", {"condition": "none", "distillation": 0.0}, "next_token_nats"),
        (
            "cp",
            {"base_start": "random", "start": "identity", "seed": 7},
            "next_token_nats",
        ),
    ],
)
def test_full_recipe_moves_the_base_model_and_names_it(
    train: Factory,
    tiny_model: Factory,
    kind: str,
    options: dict[str, Any],
    figure: str,
) -> None:
    folder = train(
        kind,
        recipe="full",
        base_learning_rate=1e-3,
        **options,
    )
    config = load_config(folder)
    assert config.verifier == str((folder / "base").resolve())
    assert check_folder(folder).kind == kind
    ours = load_file(folder / "base" / "model.safetensors")
    theirs = load_file(tiny_model() / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    moved = float((ours[name] - theirs[name]).norm() / theirs[name].norm())
    assert moved > 1 if "base_start" in options else 0 < moved < 0.5
    assert_learned(folder, figure)


def test_a_target_that_is_trained_is_judged_by_its_loss(
    train: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrained one's guesses are easily drafted."""
    real = loop.Run.evaluate
    seen = []

    def evaluate(*args: Any) -> Any:
        seen.append(real(*args))
        return seen[-1]

    monkeypatch.setattr(loop.Run, "evaluate", evaluate)
    train(
        "dynamo",
        recipe="full",
        base_learning_rate=1e-3,
        steps=1,
    )
    train("dynamo", out="frozen", steps=1)
    is_undecided = [evaluation.accepted is None for evaluation in seen]
    assert is_undecided == [True, True, False, False]
    assert all("accepted_a_step" in evaluation.figures for evaluation in seen)


def test_heads_pull_on_the_stem_is_scaled(train: Factory) -> None:
    """LR_MB = 0: the base model moves as plain CLM training would, whatever the heads say."""
    settings = {
        "recipe": "full",
        "steps": 4,
        "evaluation_tokens": 64,
        "base_learning_rate": 1e-4,
        "stem_learning_rate": 0.0,
    }
    weights = {}
    for out, changes in (
        ("copied", {}),
        ("random", {"start": "random"}),
        ("pulled", {"stem_learning_rate": 1e-4}),
    ):
        folder = train("dynamo", out=out, **{**settings, **changes})
        tensors = load_file(folder / "base" / "model.safetensors")
        weights[out] = tensors["model.layers.2.mlp.down_proj.weight"]
    torch.testing.assert_close(weights["copied"], weights["random"])
    assert not torch.allclose(weights["copied"], weights["pulled"], atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"exit_layers": 6},
            "exit_layers names layer 6, outside 1..5",
        ),
        (
            {"sequence_length": 4096},
            "--sequence-length 4096 is more than the 512 positions",
        ),
        ({"batch_size": 3, "accumulation": 2}, "--batch-size 3 is not divisible"),
        ({"patience": 2}, "--patience 2 needs --evaluate-every"),
        ({"model": "/nowhere"}, "cannot load model '/nowhere'"),
        (
            {"device": "cuda:7"},
            "CUDA devices are available; use another, or --device cpu",
        ),
        ({"betas": "0.9,1"}, "must be less than 1"),
    ],
)
def test_bad_input_is_one_line(
    command: Factory,
    tmp_path: Path,
    capsys: Any,
    options: dict[str, Any],
    message: str,
) -> None:
    assert main(command(**options)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert not (tmp_path / "heads" / "config.json").exists()


def test_heads_that_could_not_be_written_are_refused_at_the_start(
    train: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = KINDS["early"]
    monkeypatch.setattr(
        recipe_of("early"), "config", lambda _: early.model_validate({})
    )
    monkeypatch.setattr(loop.Run, "evaluate", None)
    message = "no heads of this model can be written with these options: "
    with pytest.raises(TrainingError, match=message):
        train()
    message = "--states-cache needs a frozen target, but --recipe full trains it"
    with pytest.raises(TrainingError, match=message):
        train("dynamo", recipe="full", states_cache="there")


def test_ppds_recipe_is_the_default_of_its_head() -> None:
    """PPD, Table 4, unless the user says otherwise."""
    make = partial(
        KINDS["early"].options,
        model="m",
        data=("d",),
        out="o",
    )
    published = make(head="classifier")
    assert (published.optimizer, published.learning_rate) == ("adamw", 2e-5)
    assert (published.batch_size, published.epochs) == (128, 3.0)
    assert make(head="classifier", learning_rate=1e-3).learning_rate == 1e-3
    assert make().optimizer == "muon"
