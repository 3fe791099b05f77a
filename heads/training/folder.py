# SPDX-License-Identifier: Apache-2.0
"""The folder that a run of training writes: held by one run, checked, and told where it is left unfinished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.io import CONFIG_NAME
from vllm_ppd.heads.locking import writing_folder
from vllm_ppd.heads.training.options import TrainingOptions
from vllm_ppd.heads.training.signals import Stopped
from vllm_ppd.heads.training.state import peek_facts

WORK = ".training"  # inside the heads folder while a run is unfinished
# A run may continue with these changed.
FREE_TO_CHANGE = {"learning_rate", "base_learning_rate", "stem_learning_rate"}


@contextmanager
def unfinished_run(options: TrainingOptions, is_main: bool) -> Iterator[Path]:
    """The folder of checkpoints in the heads folder, which no other run writes meanwhile.

    Args:
        options: of the run.
        is_main: of several processes of one run, which share the folder, the main one alone holds it.

    Raises:
        InUse: if another run writes the heads folder.
        TrainingError: if that holds finished heads or a run with other options.
        Stopped: in place of a KeyboardInterrupt that does not say where the run is left.
    """
    out = Path(options.out)
    work = out / WORK
    with writing_folder(out) if is_main else nullcontext():
        _check(options, out, work)
        try:
            yield work
        except Stopped:
            raise
        except KeyboardInterrupt:
            facts = peek_facts(work)
            raise Stopped(0 if facts is None else facts.step, options.steps) from None


def _check(options: TrainingOptions, out: Path, work: Path) -> None:
    """Refuse a folder that holds finished heads or a run with other options."""
    facts = peek_facts(work)
    if facts is None:
        if (out / CONFIG_NAME).exists():
            raise TrainingError(f"--out {str(out)!r} already holds heads or a model; delete it or give another folder")
        return
    ours, theirs = options.essence(), facts.options
    for name in sorted(set(ours) | set(theirs)):
        if ours.get(name) != theirs.get(name) and name not in FREE_TO_CHANGE:
            raise TrainingError(
                f"--out {str(out)!r} holds an unfinished run with {name}={theirs.get(name)!r}, and this one has "
                f"{ours.get(name)!r}: give the same options to continue it, or another folder"
            )
