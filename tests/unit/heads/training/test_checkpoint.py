# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped or killed continues from its last complete checkpoint to the
same heads.
"""

import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import accelerate.checkpointing
import pytest
import torch
from conftest import Factory
from forkserver import Forkserver
from records import read
from safetensors import SafetensorError
from safetensors.torch import load_file
from vllm.utils.network_utils import get_open_port

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.files import InUse, writing_folder
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.training import loop
from vllm_ppd.heads.training.checkpoint import FACTS, WORK, latest, read_facts
from vllm_ppd.vllm_plugins.cli.main import main


def ppd(words: list[str], output: Path) -> None:
    """The command in a process of its own, and what it prints."""
    with output.open("w") as file, redirect_stdout(file):
        raise SystemExit(main(words))


def assert_same_heads(
    ours: Path,
    theirs: Path,
) -> None:
    expected = load_file(theirs / "model.safetensors")
    tensors = load_file(ours / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(
            tensor,
            expected[name],
            atol=1e-6,
            rtol=1e-5,
        )


@pytest.mark.parametrize(
    ("kind", "options", "count", "step"),
    [
        *[(kind, {}, 6, 5) for kind in KINDS if kind != "early"],
        # Stopped in the second of four parts of a step.
        ("early", {"accumulation": 4}, 10, 2),
    ],
)
def test_a_stopped_run_continues_to_the_same_heads(
    train: Factory,
    stop_at: Factory,
    capsys: Any,
    kind: str,
    options: dict[str, Any],
    count: int,
    step: int,
) -> None:
    """It ends at once, and only the step that was stopped is done again."""
    train = partial(
        train,
        kind,
        evaluate_every=4,
        save_every=3,
        **options,
    )
    whole = train(out="whole")
    batches = stop_at(count)
    with pytest.raises(loop.Stopped, match=f"stopped at step {step} of 12"):
        train(out="parts")
    assert len(batches) == count
    assert not (whole.parent / "parts" / "config.json").exists()
    parts = train(out="parts")
    assert f"continues at step {step} of 12" in capsys.readouterr().err
    assert len(batches) == count + (12 - step) * options.get("accumulation", 1)
    assert_same_heads(parts, whole)
    assert (parts / loop.CURVE).read_text() == (whole / loop.CURVE).read_text()


def test_a_killed_run_continues_to_the_same_heads(
    command: Factory, tmp_path: Path
) -> None:
    """Killed three times, wherever it is."""
    options: dict[str, Any] = {"steps": 30, "save_every": 2, "evaluate_every": 4}
    assert main(command(**options, out="whole")) == 0
    words = command(**options, out="parts")
    work = tmp_path / "parts" / WORK
    for reached in (2, 8, 14):
        run = Forkserver().Process(target=ppd, args=(words, tmp_path / "log"))
        run.start()
        deadline = time.monotonic() + 300
        while (facts := read_facts(work)) is None or facts.step < reached:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run.kill()
        run.join()
    assert main(words) == 0
    assert_same_heads(tmp_path / "parts", tmp_path / "whole")
    parts, whole = (
        [point["step"] for point in read(tmp_path / out / loop.CURVE)]
        for out in ("parts", "whole")
    )
    assert parts == whole


def test_damaged_checkpoints(
    train: Factory,
    tmp_path: Path,
    stop_at: Factory,
) -> None:
    """One that a kill left half written is passed over; others are refused in one line."""
    stop_at(6)
    with pytest.raises(loop.Stopped):
        train(save_every=2)
    work = tmp_path / "heads" / WORK
    newest = work / "checkpoints" / "checkpoint_5"
    assert latest(work) == newest
    message = r"delete the folder \.training to start again"
    for name in ("model.safetensors", "optimizer.bin", FACTS):
        good = (newest / name).read_bytes()
        (newest / name).write_bytes(good[: len(good) // 2])
        with pytest.raises(TrainingError, match=message):
            train(save_every=2)
        (newest / name).write_bytes(good)
    (newest / FACTS).unlink()
    assert latest(work) == work / "checkpoints" / "checkpoint_4"
    train(save_every=2)


def test_other_options_and_finished_heads_are_refused(
    train: Factory, tmp_path: Path, stop_at: Factory
) -> None:
    stop_at(6)
    with pytest.raises(loop.Stopped):
        train()
    message = "holds an unfinished run with batch_size=4, but this run has 2: use the same options"
    with pytest.raises(TrainingError, match=message):
        train(batch_size=2)
    with writing_folder(tmp_path / "heads"), pytest.raises(InUse):
        train()
    train(learning_rate=1e-4, save_every=1)
    with pytest.raises(TrainingError, match="already holds heads"):
        train("cp")


def test_a_loss_that_is_not_finite_ends_training(
    train: Factory, tmp_path: Path, stop_at: Factory
) -> None:
    stop_at(6)
    with pytest.raises(loop.Stopped):
        train()
    message = "is not finite; the checkpoint of step .* is kept: .*lower --learning-rate"
    with pytest.raises(TrainingError, match=message):
        train(learning_rate=1e38)
    facts = read_facts(tmp_path / "heads" / WORK)
    assert facts is not None and facts.step == 5
    train(learning_rate=1e-4)  # as the message says


def test_a_full_disk_loses_nothing(
    command: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = command(steps=6, save_every=2)
    real = accelerate.checkpointing.save

    def full(obj: Any, path: Any, **kwargs: Any) -> None:
        if "checkpoint_4" in str(path):
            raise SafetensorError(
                "I/O error: No space left on device (os error 28)"
            )
        real(obj, path, **kwargs)

    monkeypatch.setattr(accelerate.checkpointing, "save", full)
    assert main(words) == 2
    assert "No space left" in capsys.readouterr().err.strip().splitlines()[-1]
    facts = read_facts(tmp_path / "heads" / WORK)
    assert facts is not None and facts.step == 2
    monkeypatch.undo()
    assert main(words) == 0


def test_two_processes_train_what_one_does(
    command: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun starts them: halves of every batch, averaged gradients; one summary."""
    settings = {"steps": 6, "optimizer": "adamw"}
    assert main(command(out="alone", **settings)) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(get_open_port()))
    logs = [tmp_path / "first", tmp_path / "second"]
    runs = []
    for rank, log in enumerate(logs):
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, str(rank))
        words = command(out="several", **settings)
        run = Forkserver().Process(target=ppd, args=(words, log))
        run.start()
        runs.append(run)
    for run in runs:
        run.join()
        assert run.exitcode == 0
    assert "".join(log.read_text() for log in logs).count("wrote") == 1
    expected = load_file(tmp_path / "alone" / "model.safetensors")
    # AdamW divides a gradient by its own size: where it is tiny, another order of sums
    # moves a weight by up to a step.
    for name, tensor in load_file(
        tmp_path / "several" / "model.safetensors"
    ).items():
        difference = (tensor - expected[name]).abs()
        assert (difference > 1e-4).float().mean() < 0.01, name
        assert difference.max() < 5e-3, name
