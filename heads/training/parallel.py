# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, managed by accelerate: one, or those that torchrun started."""

from __future__ import annotations

import logging
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from tqdm import tqdm

from vllm_ppd.heads.errors import TrainingError


def device_of(name: str) -> torch.device:
    """The device that a user names; `auto` is a GPU if there is one.

    Raises:
        TrainingError: if the name is not a device, or the device does not exist.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainingError(
            f"--device {name}: {str(error).splitlines()[0]}"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count() or "no"
        raise TrainingError(
            f"--device {name}: {count} CUDA devices are available; use another, or "
            "--device cpu"
        )
    return device


def cpu_computes_bfloat16() -> bool:
    """Whether the processor has bfloat16 instructions; others emulate them, which is
    several times slower.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return bool(
        torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    )


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
