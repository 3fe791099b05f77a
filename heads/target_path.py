# SPDX-License-Identifier: Apache-2.0
"""Where the target of heads is: the name that their `config.json` has, and what of this disk it leads to."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.quote import quoted


def find_target(name: str, folder: str | os.PathLike[str]) -> str:
    """The target that heads name, as whoever loads it should call it.

    A relative path is looked for in the heads' folder and the folders above it, so that it travels with a checkout, and
    then in the current folder.

    Args:
        name: `name_or_path` of the heads' verifier.
        folder: the heads folder.

    Returns:
        The name itself where it leads to a model from here, or nowhere (it may be a name on the Hub); else a path.
    """
    path = _from(folder, name)
    if path is None or (_is_model(name) and os.path.samefile(name, path)):
        return name
    return path


def stored_name(name: str, folder: str | os.PathLike[str]) -> str:
    """What heads in a folder should call their target: a relative path only where it leads back from there."""
    if os.path.isabs(name) or not _is_model(name):
        return name
    path = _from(folder, name)
    return name if path is not None and os.path.samefile(name, path) else os.path.abspath(name)


def check_reachable(target: str, folder: str | os.PathLike[str], instead: str) -> None:
    """Refuse a target that is not on this disk and cannot be a name on the Hub.

    Args:
        target: as find_target returned it.
        folder: the heads folder.
        instead: how to name another.

    Raises:
        HeadsError: naming the target, where it was looked for, and what to do instead.
    """
    if not _is_model(target) and not _is_hub_name(target):
        raise HeadsError(
            f"target {quoted(target)} of the heads in {quoted(os.fspath(folder))} is not there, nor in a folder above "
            f"it, nor in the current one; {instead}"
        )


def _from(folder: str | os.PathLike[str], name: str) -> str | None:
    """The path of a model by that name in a folder or in one above it; None if there is none."""
    here = Path(folder).resolve()
    return next((str(base / name) for base in (here, *here.parents) if _is_model(base / name)), None)


def _is_model(path: str | os.PathLike[str]) -> bool:
    return os.path.isfile(os.path.join(path, "config.json"))


def _is_hub_name(name: str) -> bool:
    """Whether it may be on the Hub; offline, whether it is in the Hub's cache."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(name, "config.json"), str)
