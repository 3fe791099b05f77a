# SPDX-License-Identifier: Apache-2.0
"""Unfinished training runs: their locks, the options with which they may continue, and checkpoints.

A checkpoint is a folder of Accelerator.save_state with facts and digests of its files; a new one is written beside
the last and then replaces it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from vllm_ppd.heads.errors import TrainingError, refuse_other_options
from vllm_ppd.heads.files import FileDigest, digest_of, first_damaged, first_problem, write_text
from vllm_ppd.heads.io import CONFIG_NAME
from vllm_ppd.heads.locking import writing_folder
from vllm_ppd.heads.quote import place, shortened
from vllm_ppd.heads.training.evaluation import Progress
from vllm_ppd.heads.training.options import TrainingOptions
from vllm_ppd.heads.training.parallel import Processes
from vllm_ppd.heads.training.signals import Stopped

WORK = ".training"  # in the heads folder of an unfinished run
STATE, BEST = "state", "best"  # a run's newest weights, and those of its best evaluation
FACTS = "facts.json"
# A run may continue with these options changed.
FREE_TO_CHANGE = {"learning_rate", "base_learning_rate", "stem_learning_rate"}


class RunFacts(BaseModel):
    """The progress of a run."""

    model_config = ConfigDict(extra="forbid")

    options: dict[str, Any]
    step: int = Field(ge=0)
    seconds: float
    before: dict[str, Any]  # the evaluation before the first step
    smoothed: float  # moving average of the loss
    best: float
    tokens: str  # digest of the token files
    held_out: Progress = Progress()
    files: dict[str, FileDigest] = {}


def essence(options: TrainingOptions, processes: Processes) -> dict[str, Any]:
    """The options that must be the same for a stopped run to continue."""
    return options.essence() | {"processes": processes.num_processes}


@contextmanager
def unfinished_run(options: TrainingOptions, processes: Processes) -> Iterator[Path]:
    """The folder of checkpoints in the heads folder, locked against other runs.

    If a run has several processes, which share the folder, only the main one holds the lock.

    Raises:
        InUse: if another run writes the heads folder.
        TrainingError: if the folder holds finished heads, a damaged checkpoint, or a run with other options.
        Stopped: in place of a KeyboardInterrupt, with the step that the run has reached.
    """
    out = Path(options.out)
    work = out / WORK
    with writing_folder(out) if processes.is_main_process else nullcontext():
        _check(out, intact_facts(work / STATE), essence(options, processes))
        try:
            yield work
        except Stopped:
            raise
        except KeyboardInterrupt:
            facts = read_facts(work / STATE)
            raise Stopped(0 if facts is None else facts.step, options.steps) from None


def _check(out: Path, facts: RunFacts | None, ours: dict[str, Any]) -> None:
    """Refuse a folder that holds finished heads or a run with other options."""
    if facts is None:
        if (out / CONFIG_NAME).exists():
            raise TrainingError(f"--out {str(out)!r} already holds heads or a model; delete it or give another folder")
        return
    theirs, ours = ({name: run[name] for name in run.keys() - FREE_TO_CHANGE} for run in (facts.options, ours))
    refuse_other_options(f"--out {str(out)!r} holds an unfinished run", theirs, ours, "another folder")


def save(folder: Path, facts: RunFacts, processes: Processes) -> None:
    """Write the prepared state of `processes` and the facts in place of the last checkpoint; all processes call it."""
    written, old = folder.with_name(f"{folder.name}.part"), folder.with_name(f"{folder.name}.old")
    if processes.is_main_process:
        shutil.rmtree(written, ignore_errors=True)
    processes.wait_for_everyone()
    try:
        processes.save_state(str(written))
    except (SafetensorError, RuntimeError) as error:  # from safetensors and torch.save, also if a disk is full
        shutil.rmtree(written, ignore_errors=True)
        raise OSError(f"{place(folder)} cannot be written ({shortened(str(error))})") from error
    processes.wait_for_everyone()
    if processes.is_main_process:
        files = {path.name: digest_of(path) for path in sorted(written.iterdir())}
        write_text(written / FACTS, json.dumps(facts.model_copy(update={"files": files}).model_dump()))
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        written.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    processes.wait_for_everyone()


def load(folder: Path, step: int, processes: Processes) -> None:
    """Restore the prepared state of `processes`.

    Raises:
        TrainingError: if the checkpoint is missing, damaged, of another step or of other heads.
    """
    facts = intact_facts(folder)
    if facts is None or facts.step != step:
        raise _damaged(folder, f"it is not from step {step}")
    try:
        processes.load_state(str(_present(folder)))
    except (RuntimeError, ValueError, KeyError) as error:
        raise TrainingError(
            f"{place(folder)} does not match these heads ({shortened(str(error), 80)}); delete the folder {WORK} there "
            "to start again"
        ) from None


def read_facts(folder: Path) -> RunFacts | None:
    """The facts of a checkpoint; None if there is none.

    Raises:
        TrainingError: if the file is damaged.
    """
    path = _present(folder) / FACTS
    if not path.parent.exists():
        return None
    try:
        return RunFacts.model_validate(json.loads(path.read_bytes()))
    except ValidationError as error:
        raise _damaged(path, first_problem(error)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None


def intact_facts(folder: Path) -> RunFacts | None:
    """The same as read_facts, after a check that the checkpoint's files are undamaged.

    Raises:
        TrainingError: if one of them is damaged.
    """
    facts = read_facts(folder)
    damaged = None if facts is None else first_damaged(_present(folder), facts.files)
    if damaged is not None:
        raise _damaged(damaged, "its checksum differs")
    return facts


def _present(folder: Path) -> Path:
    """A checkpoint's folder, or the previous one if a kill came between two renames."""
    old = folder.with_name(f"{folder.name}.old")
    return old if old.exists() and not folder.exists() else folder


def _damaged(path: Path, reason: str) -> TrainingError:
    return TrainingError(
        f"{place(path)} is damaged ({shortened(reason, 80)}); delete the folder {WORK} there to start again"
    )
