# SPDX-License-Identifier: Apache-2.0
"""`curve.jsonl` beside the heads: training loss and held-out figures by step, written during the run."""

import json
from pathlib import Path
from typing import Any

from vllm_ppd.heads.files import write_text

NAME = "curve.jsonl"
POINTS = 500  # most training losses per run


def begin_curve(folder: Path, step: int) -> None:
    """Begin the file of a run, or drop what was written after the checkpoint from which it continues."""
    path = folder / NAME
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if step and path.is_file() else []
    write_text(path, "".join(f"{line}\n" for line in lines if _is_until(step, line)))


def add_point(folder: Path, step: int, tokens: int, **figures: Any) -> None:
    """Append a line.

    Args:
        folder: the heads folder.
        step: optimiser steps so far.
        tokens: read by these steps.
        figures: `loss`, the mean training loss since the last such line, with `rate`, the factor on the peak learning
            rates; or `held_out_loss` and `held_out`, figures by name as in provenance.json.
    """
    with (folder / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "tokens": tokens} | figures) + "\n")


def _is_until(step: int, line: str) -> bool:
    """Whether a line is of that step or an earlier one; a line that a kill cut off is not."""
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False
