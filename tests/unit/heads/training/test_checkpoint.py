# SPDX-License-Identifier: Apache-2.0
"""A run continues from a whole checkpoint; a damaged one is refused in one line, and nothing of it is loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Factory, patterned_texts, write_texts
from damages import DAMAGE
from torch import nn

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.training.checkpoint import FACTS, STATE, WORK, RunFacts, load, read_facts, save
from vllm_ppd.heads.training.parallel import Processes
from vllm_ppd.vllm_plugins.cli.main import main

FILES = ("model.safetensors", "optimizer.bin", FACTS)
RUN = RunFacts(options={"kind": "early"}, step=3, seconds=1.5, before={}, smoothed=1.0, best=0.5, tokens="abc")


def prepared(width: int = 5, seed: int = 0) -> tuple[Processes, nn.Module, torch.optim.Optimizer]:
    """A module and its optimiser after a step."""
    torch.manual_seed(seed)
    processes = Processes("cpu")
    module = nn.Linear(6, width)
    module, optimizer = processes.prepare(module, torch.optim.AdamW(module.parameters()))
    module(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return processes, module, optimizer


def test_a_checkpoint_is_restored(tmp_path: Path) -> None:
    processes, module, optimizer = prepared()
    assert read_facts(tmp_path / STATE) is None
    save(tmp_path / STATE, RUN, processes)
    others, other, its_optimizer = prepared(seed=1)
    assert not torch.equal(other.weight, module.weight)
    load(tmp_path / STATE, 3, others)
    assert torch.equal(other.weight, module.weight)
    ours, theirs = (made.state_dict()["state"] for made in (its_optimizer, optimizer))
    assert all(torch.equal(ours[i][name], value) for i, state in theirs.items() for name, value in state.items())
    facts = read_facts(tmp_path / STATE)
    assert facts is not None and facts.model_copy(update={"files": {}}) == RUN


def test_a_kill_between_two_checkpoints_leaves_one(tmp_path: Path) -> None:
    """Wherever it comes: while the next is written, and between the renames that put it in the place of the last."""
    processes, _, _ = prepared()
    save(tmp_path / STATE, RUN, processes)
    (tmp_path / f"{STATE}.part").mkdir()
    (tmp_path / STATE).rename(tmp_path / f"{STATE}.old")
    load(tmp_path / STATE, 3, processes)
    save(tmp_path / STATE, RUN.model_copy(update={"step": 4}), processes)
    assert [path.name for path in tmp_path.iterdir()] == [STATE]
    load(tmp_path / STATE, 4, processes)


@pytest.mark.parametrize("name", FILES)
def test_every_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    processes, module, _ = prepared()
    save(tmp_path / STATE, RUN, processes)
    path = tmp_path / STATE / name
    good = path.read_bytes()
    flips = [good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :] for at in range(8, len(good), 61)]
    for data in (*(damage(good) for damage in DAMAGE.values()), *flips, None):
        path.unlink() if data is None else path.write_bytes(data)
        with torch.no_grad():
            module.weight.fill_(0.5)
        try:
            load(tmp_path / STATE, 3, processes)
        except TrainingError as error:
            assert f"delete the folder {WORK} there" in str(error)
            assert len(str(error)) <= 300 and "\n" not in str(error)
            assert bool((module.weight == 0.5).all())
        else:  # a flipped bit in a fact that no weight depends on
            assert name == FACTS and data in flips


@pytest.mark.parametrize("facts", ["", "[]", "{}", "3", "{", json.dumps(RUN.model_dump() | {"step": -1})])
def test_facts_of_another_shape_are_refused(tmp_path: Path, facts: str) -> None:
    processes, _, _ = prepared()
    save(tmp_path / STATE, RUN, processes)
    (tmp_path / STATE / FACTS).write_text(facts)
    for read in (lambda: read_facts(tmp_path / STATE), lambda: load(tmp_path / STATE, 3, processes)):
        with pytest.raises(TrainingError, match="is damaged"):
            read()


def test_a_checkpoint_of_other_heads_or_of_another_step_is_refused(tmp_path: Path) -> None:
    save(tmp_path / STATE, RUN, prepared()[0])
    others, _, _ = prepared(width=1)  # the weights could be broadcast
    with pytest.raises(TrainingError, match="does not match these heads"):
        load(tmp_path / STATE, 3, others)
    with pytest.raises(TrainingError, match="it is not from step 4"):
        load(tmp_path / STATE, 4, prepared()[0])


def test_changed_data_and_damaged_state_end_with_one_line(
    command: Callable[..., list[str]], stop_at: Factory, tmp_path: Path, capsys: Any
) -> None:
    data, work = write_texts(tmp_path / "data.jsonl", patterned_texts(60, 6)), tmp_path / "heads" / WORK
    words = command("--steps", "8", "--exit-layers", "3", data=data)
    stop_at(3)
    assert main(words) == 130
    text = data.read_text()
    write_texts(data, patterned_texts(61, 6))
    capsys.readouterr()
    assert main(words) == 2
    assert "was trained on other tokens: the data or the tokenizer changed" in capsys.readouterr().err
    state = work / STATE / "model.safetensors"
    good = state.read_bytes()
    state.write_bytes(good[: len(good) // 2])
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model.safetensors is damaged" in line
    assert "delete the folder .training there to start again" in line
    state.write_bytes(good)
    data.write_text(text)
    (work / "train.tokens").write_bytes(b"")
    assert main(words) == 0
    facts = json.loads((tmp_path / "heads" / "provenance.json").read_text())
    assert facts["documents_in_data"] == 60
    assert facts["skipped_records"] == {}
