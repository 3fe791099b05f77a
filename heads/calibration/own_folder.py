# SPDX-License-Identifier: Apache-2.0
"""The folder that a calibration writes into: the heads' own, or a copy of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from vllm_ppd.heads.card import NAME as CARD
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import check_is_folder
from vllm_ppd.heads.hub import folder_of, hub_name
from vllm_ppd.heads.io import CONFIG_NAME, WEIGHTS_NAME, load_tensors
from vllm_ppd.heads.quote import quoted
from vllm_ppd.heads.training.provenance import NAME as PROVENANCE


def check_own_folder(heads: str, out: str | None) -> None:
    """Refuse heads that cannot be calibrated in place, where no copy is asked for.

    Raises:
        HeadsError: if they are on the Hub, or no folder.
    """
    if out is not None:
        return
    if hub_name(heads) is not None:
        raise HeadsError(f"heads {quoted(heads)} are on the Hub; give --out DIR for a copy with their calibration")
    check_is_folder(heads)


def own_folder(heads: str, out: str | None) -> str:
    """Where to calibrate heads; a copy that an earlier run made is gone on with.

    Args:
        heads: a folder, or with `out` a name on the Hub, whose cache is not written to.
        out: folder of the copy (None: no copy).

    Raises:
        HeadsError: if `out` holds anything else.
    """
    if out is None:
        return heads
    config, tensors = load_tensors(heads)
    folder = Path(out)
    if (folder / CONFIG_NAME).exists():
        copied, found = load_tensors(folder)
        same = copied.kind == config.kind and found.keys() == tensors.keys()
        if not same or not all(torch.equal(found[name], tensor) for name, tensor in tensors.items()):
            raise HeadsError(f"--out {quoted(out)} holds other heads; give another folder, or delete it")
        return out
    source = Path(folder_of(heads, CONFIG_NAME, WEIGHTS_NAME, also=(PROVENANCE, CARD)))
    folder.mkdir(parents=True, exist_ok=True)
    # The configuration last: a folder without it is not one of heads, and a stopped run copies again.
    for name in (WEIGHTS_NAME, PROVENANCE, CARD, CONFIG_NAME):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    return out
