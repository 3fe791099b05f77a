# SPDX-License-Identifier: Apache-2.0
"""A run that continues from damaged files: tokens are made again, the rest is refused in one line; nothing wrong is
trained on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import patterned_texts, write_texts
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.training import loop
from vllm_ppd.heads.training.folder import WORK
from vllm_ppd.heads.training.state import NAME, RunFacts, load_state, peek_facts, save_state
from vllm_ppd.heads.training.tokens import FILES, TokenStore
from vllm_ppd.vllm_plugins.cli.main import main

Damage = Callable[[bytes], bytes]
DAMAGE: dict[str, Damage] = {
    "cut in half": lambda data: data[: len(data) // 2],
    "cut by one": lambda data: data[:-1],
    "empty": lambda _: b"",
    "longer": lambda data: data + b"\0" * 8,
    "a byte flipped": lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:],
    "zeros": lambda data: b"\0" * len(data),
}
ODD_JSON = ["", "{", "null", "[]", "3", '{"key": 1}', '{"key": "x"}', "\ufeff{}", "[" * 5000]


def store(tmp_path: Path) -> TokenStore:
    data = tmp_path / "data.jsonl"
    if not data.exists():
        write_texts(data, [f"{chr(65 + i % 26) * (5 + i % 9)} {i}" for i in range(300)])
    return TokenStore(tmp_path / "work", [data], tiny.make_tokenizer(), tiny.VOCAB, 0.3, 16)


def contents(made: TokenStore) -> list[np.ndarray]:
    return [np.array(values) for part in (made.tokens, made.starts) for values in part.values()]


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damaged_token_files_are_made_again(tmp_path: Path, capsys: Any, name: str, how: str) -> None:
    before = contents(store(tmp_path))
    path = tmp_path / "work" / name
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    capsys.readouterr()
    for ours, theirs in zip(contents(store(tmp_path)), before, strict=True):
        assert np.array_equal(ours, theirs)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("vllm-ppd"))
    assert f"{name} is damaged or missing; tokenising the data again" in line
    store(tmp_path)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("text", ODD_JSON)
def test_damaged_manifest(tmp_path: Path, text: str) -> None:
    before = contents(store(tmp_path))
    (tmp_path / "work" / "tokens.json").write_text(text)
    for ours, theirs in zip(contents(store(tmp_path)), before, strict=True):
        assert np.array_equal(ours, theirs)


def test_missing_token_file(tmp_path: Path) -> None:
    before = contents(store(tmp_path))
    (tmp_path / "work" / "train.starts").unlink()
    for ours, theirs in zip(contents(store(tmp_path)), before, strict=True):
        assert np.array_equal(ours, theirs)


FACTS = RunFacts(options={"kind": "early"}, step=3, seconds=1.5, before={}, smoothed=1.0, best=0.5, tokens="abc")


def module() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return made, optimizer


def test_state_is_restored(tmp_path: Path) -> None:
    made, optimizer = module()
    save_state(tmp_path, made, optimizer, FACTS)
    fresh = nn.Linear(6, 5)
    other = torch.optim.AdamW(fresh.parameters())
    assert peek_facts(tmp_path) == load_state(tmp_path, fresh, other) == FACTS
    assert torch.equal(fresh.weight, made.weight)
    ours, theirs = other.state_dict()["state"], optimizer.state_dict()["state"]
    assert [{name: t.tolist() for name, t in ours[i].items()} for i in (0, 1)] == [
        {name: t.tolist() for name, t in theirs[i].items()} for i in (0, 1)
    ]
    assert load_state(tmp_path / "none", fresh, other) is None


def test_every_damaged_state_is_refused(tmp_path: Path) -> None:
    made, optimizer = module()
    save_state(tmp_path, made, optimizer, FACTS)
    path = tmp_path / NAME
    good = path.read_bytes()
    flips = [good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :] for at in range(8, len(good), 7)]
    for data in (*(how(good) for how in DAMAGE.values()), *flips, b"x", good[:8], good[:40]):
        path.write_bytes(data)
        fresh = nn.Linear(6, 5)
        before = fresh.weight.clone()
        try:
            found = load_state(tmp_path, fresh, torch.optim.AdamW(fresh.parameters()))
        except TrainingError as error:
            assert "delete the folder" in str(error)
            assert len(str(error)) <= 300
            assert "\n" not in str(error)
            assert torch.equal(fresh.weight, before)
        else:  # white space of the header
            assert found == FACTS
            assert torch.equal(fresh.weight, made.weight)


@pytest.mark.parametrize("facts", [None, "[]", "{}", "3", "{", json.dumps(FACTS.model_dump() | {"step": -1})])
def test_state_of_another_shape(tmp_path: Path, facts: str | None) -> None:
    made, optimizer = module()
    save_file({"module.weight": made.weight}, tmp_path / NAME, {"facts": facts} if facts else None)
    for read in (lambda: peek_facts(tmp_path), lambda: load_state(tmp_path, made, optimizer)):
        with pytest.raises(TrainingError, match="is damaged"):
            read()


def test_state_of_other_heads_or_without_moments(tmp_path: Path) -> None:
    made, optimizer = module()
    save_state(tmp_path, made, optimizer, FACTS)
    other = nn.Linear(6, 1)  # its weights could be broadcast
    with pytest.raises(TrainingError, match="is of other heads"):
        load_state(tmp_path, other, torch.optim.AdamW(other.parameters()))
    with safe_open(tmp_path / NAME, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys() if name.startswith("module.")}  # noqa: SIM118
    save_file(weights, tmp_path / NAME, {"facts": FACTS.model_dump_json()})
    with pytest.raises(TrainingError, match="lacks the optimiser's state"):
        load_state(tmp_path, made, optimizer)


def test_changed_data_and_damaged_state_end_with_one_line(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    data, out = write_texts(tmp_path / "data.jsonl", patterned_texts(60, 6)), tmp_path / "heads"
    options = KINDS["early"].options(
        model=str(tiny_model()), data=(str(data),), out=str(out), steps=8, sequence_length=32, batch_size=2,
        precision="float32", device="cpu", held_out=0.1, exit_layers=(3,),
    )  # fmt: skip
    compute, steps = loop._Run._loss_and_gradient, []

    def stopped(self: Any, *args: Any) -> float:
        steps.append(self.step)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return compute(self, *args)

    monkeypatch.setattr(loop._Run, "_loss_and_gradient", stopped)
    with pytest.raises(loop.Stopped):
        loop.train(options)
    text = data.read_text()
    write_texts(data, patterned_texts(61, 6))
    with pytest.raises(TrainingError, match="was trained on other tokens: the data or the tokenizer has changed"):
        loop.train(options)
    state = out / WORK / NAME
    good = state.read_bytes()
    state.write_bytes(good[: len(good) // 2])
    argv = [
        "train", "early", "--model", str(tiny_model()), "--data", str(data), "--out", str(out), "--steps", "8",
        "--sequence-length", "32", "--batch-size", "2", "--precision", "float32", "--device", "cpu",
        "--held-out", "0.1", "--exit-layers", "3",
    ]  # fmt: skip
    capsys.readouterr()
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "state.safetensors is damaged" in line
    assert "delete the folder .training there to start again" in line
    state.write_bytes(good)
    data.write_text(text)
    (out / WORK / "train.ids").write_bytes(b"")
    assert main(argv) == 0
    facts = json.loads((out / "provenance.json").read_text())
    assert facts["documents_in_data"] == 60
    assert facts["skipped_records"] == {}
