# SPDX-License-Identifier: Apache-2.0
"""Unfinished training runs: their processes and locks, the options with which they may
continue, their evaluations, and checkpoints.

accelerate writes a checkpoint; the file of its facts comes last and marks it as
complete.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import nn
from tqdm import tqdm

from vllm_ppd.heads.errors import Stopped, TrainingError, refuse_other_options
from vllm_ppd.heads.files import replaced, write_text, writing_folder
from vllm_ppd.heads.folder import CONFIG_NAME
from vllm_ppd.heads.options import TrainingOptions
from vllm_ppd.heads.training.target import device_of

WORK = ".training"  # in the heads folder of an unfinished run
FACTS = "facts.json"
BEST = "best.safetensors"  # the weights of the best evaluation
LEAST = 1e-3  # least relative improvement of the decisive figure that counts


class Processes(Accelerator):
    """The processes of a run, of which torchrun and `accelerate launch` start several.

    Args:
        device: of a single process; several get theirs from accelerate.
        folder: of checkpoints, of which the last two are kept.
    """

    def __init__(self, device: str, folder: Path) -> None:
        alone = device_of(device)
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        # It warns whenever a checkpoint replaces another.
        logging.getLogger("accelerate.accelerator").setLevel(logging.ERROR)
        super().__init__(
            cpu=device == "cpu",
            device_placement=several,
            project_config=ProjectConfiguration(
                str(folder), automatic_checkpoint_naming=True, total_limit=2
            ),
        )
        if not several:
            self.state.device = alone

    def arithmetic(self, precision: str) -> Any:
        """A context of bfloat16 arithmetic if that is the precision."""
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=precision == "bfloat16"
        )

    def say(self, text: str) -> None:
        """Print a line to stderr without breaking a bar."""
        if self.is_main_process:
            tqdm.write(f"vllm-ppd: {text}", file=sys.stderr)

    def bar(self, name: str, tokens: int, **settings: Any) -> tqdm:
        """A progress bar of tokens."""
        return tqdm(
            desc=name,
            total=tokens,
            unit=" tokens",
            unit_scale=True,
            mininterval=1,
            disable=not self.is_main_process,
            **settings,
        )


class Evaluation(BaseModel):
    """Held-out loss and readable figures after some steps."""

    step: int
    loss: float | None  # None if nothing held out counts
    figures: dict[str, Any]
    # Greedy drafts per step, teacher-forced; None if not counted
    accepted: float | None = None

    def is_better_than(self, other: Evaluation | None) -> bool:
        """Whether more drafts are accepted, or as many at a lower loss; never if the
        loss is not finite.
        """
        if self.loss is None or not math.isfinite(self.loss):
            return False
        if other is None or other.loss is None:
            return True
        if (
            self.accepted == other.accepted
            or self.accepted is None
            or other.accepted is None
        ):
            return self.loss < other.loss - LEAST * abs(other.loss)
        return self.accepted > other.accepted * (1 + LEAST)


class Progress(BaseModel):
    """The state of a run's evaluations that decides when it stops."""

    best: Evaluation | None = None
    last: Evaluation | None = None
    stale: int = 0  # evaluations since the best one

    def take(self, evaluation: Evaluation) -> bool:
        """Record an evaluation; returns whether it is better than the best before it."""
        better = evaluation.is_better_than(self.best)
        self.last = evaluation
        if better:
            self.best = evaluation
            self.stale = 0
        elif evaluation.loss is not None:
            self.stale += 1
        return better


class RunFacts(BaseModel):
    """The progress of a run."""

    options: dict[str, Any]
    step: int = 0
    seconds: float = 0.0
    before: dict[str, Any] = {}  # figures of the evaluation before the first step
    held_out: Progress = Progress()


@contextmanager
def unfinished_run(
    options: TrainingOptions, processes: Processes
) -> Iterator[RunFacts]:
    """The progress of the run in a heads folder, which is locked against other runs.

    If a run has several processes, which share the folder, only the main one holds the
    lock.

    Raises:
        InUse: if another run writes the heads folder.
        TrainingError: if the folder holds finished heads, or a run with other options.
        Stopped: in place of a KeyboardInterrupt, with the step that the run has
            reached.
    """
    out = Path(options.out)
    work = out / WORK
    with writing_folder(out) if processes.is_main_process else nullcontext():
        if processes.is_main_process:
            _remove_incomplete(work)
        facts = read_facts(work)
        if facts is None and (out / CONFIG_NAME).exists():
            raise TrainingError(
                f"--out {str(out)!r} already holds heads or a model; delete it or "
                "use another folder"
            )
        essence = options.essence() | {"processes": processes.num_processes}
        if facts is None:
            facts = RunFacts(options=essence)
        refuse_other_options(
            f"--out {str(out)!r} holds an unfinished run",
            facts.options,
            essence,
            "another folder",
        )
        try:
            yield facts
        except Stopped:
            raise
        except KeyboardInterrupt:
            saved = read_facts(work)
            raise Stopped(saved.step if saved else 0, options.steps) from None


def latest(work: Path) -> Path | None:
    """The newest complete checkpoint; None if there is none."""
    folders = [
        path.parent for path in work.glob(f"checkpoints/checkpoint_*/{FACTS}")
    ]
    return max(
        folders,
        key=lambda folder: int(folder.name.partition("_")[2]),
        default=None,
    )


def read_facts(work: Path) -> RunFacts | None:
    """The facts of the newest checkpoint; None if there is none."""
    folder = latest(work)
    if folder is None:
        return None
    try:
        return RunFacts.model_validate_json((folder / FACTS).read_bytes())
    except ValidationError:
        raise _unusable(folder) from None


def _remove_incomplete(work: Path) -> None:
    """Remove checkpoints that a kill left half written."""
    for folder in work.glob("checkpoints/*"):
        if not (folder / FACTS).exists():
            shutil.rmtree(folder)


def save(facts: RunFacts, processes: Processes) -> None:
    """Write a checkpoint of the prepared state and the facts; all processes call it.

    Raises:
        OSError: if it cannot be written, for example on a full disk.
    """
    processes.project_configuration.iteration = facts.step  # names the folder
    try:
        folder = processes.save_state()
    except (SafetensorError, RuntimeError) as error:
        raise OSError(f"a checkpoint cannot be written: {error}") from error
    processes.wait_for_everyone()
    if processes.is_main_process:
        write_text(Path(folder) / FACTS, facts.model_dump_json())
    processes.wait_for_everyone()


def load(work: Path, processes: Processes) -> None:
    """Restore the prepared state from the newest checkpoint.

    Raises:
        TrainingError: if it is damaged, or of other heads.
    """
    folder = latest(work)
    assert folder is not None
    try:
        processes.load_state(str(folder))
    except Exception:  # which one depends on the file and the damage
        raise _unusable(folder) from None


def _unusable(folder: Path) -> TrainingError:
    return TrainingError(
        f"{folder} is damaged or of other heads; delete the folder {WORK} to "
        "start again"
    )


def save_best(work: Path, module: nn.Module, step: int) -> None:
    """Keep the weights of the best evaluation so far."""
    with replaced(work / BEST) as new:
        save_model(module, str(new), metadata={"step": str(step)})


def best_step(work: Path) -> int | None:
    """The step of the kept weights; None if there are none."""
    if not (work / BEST).exists():
        return None
    with safe_open(work / BEST, framework="pt") as file:
        return int(file.metadata()["step"])


def load_best(work: Path, module: nn.Module) -> None:
    """Restore the kept weights."""
    load_model(module, work / BEST)
