# SPDX-License-Identifier: Apache-2.0
"""Heads for a target that the user has not named: those that travel with the model, and
those that `ppd fit` has registered on this machine.

The registry is a folder beside the step costs in vLLM's caches. It has a folder for each
target, by its fingerprint, with a link to each of its heads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_ppd.heads.base import TargetFingerprint
from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.files import digest_of_value
from vllm_ppd.heads.folder import load_calibration, load_config
from vllm_ppd.heads.hub import SUBFOLDER, folder_of, hub_name, pinned_within
from vllm_ppd.heads.planning import recommend
from vllm_ppd.heads.target import TOKENIZER_NAME, fingerprint
from vllm_ppd.heads.text import StrPath
from vllm_ppd.vllm_plugins import platform

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger("vllm.vllm_ppd")

HUB_SECONDS = 5.0  # within which the Hub must answer


class Found(NamedTuple):
    """Heads of a target, and why they are taken."""

    model: str  # a folder, or a name on the Hub with its commit
    reason: str


def found_heads(
    model_config: ModelConfig,
    at_hand: Callable[[], TargetFingerprint],
    learn_dir: str | None,
) -> list[Found]:
    """Heads of a target, the best first. They are not checked.

    Args:
        model_config: of the target.
        at_hand: its fingerprint, see fingerprint_at_hand.
        learn_dir: where learned heads are.
    """
    found = _travelling(model_config)
    try:
        found += _registered(at_hand)
    except OSError as error:
        logger.warning(
            "vllm-ppd: the heads of `ppd fit` cannot be listed (%s)", error
        )
    if learn_dir is not None and at_hand() != TargetFingerprint():
        learned = learned_folder(learn_dir, at_hand())
        if os.path.lexists(learned):
            found.append(Found(learned, "an earlier start has learned them"))
    return found


def learned_folder(learn_dir: str, target: TargetFingerprint) -> str:
    """The folder of the heads that are learned for a target."""
    return os.path.join(learn_dir, digest_of_value(target.model_dump())[:16])


def _travelling(model_config: ModelConfig) -> list[Found]:
    """Heads in the model's subfolder, on this disk or on the Hub."""
    model = model_config.model
    on_hub = hub_name(model)
    heads = os.path.join(model, SUBFOLDER)
    if on_hub is not None:
        if platform.variable("VLLM_USE_MODELSCOPE"):
            return []
        name = on_hub._replace(
            revision=model_config.revision, subfolder=SUBFOLDER
        )
        try:
            heads = pinned_within(HUB_SECONDS, str(name))
        except MissingFile:
            return []
        except HeadsError as error:
            logger.warning("vllm-ppd: heads on the Hub are not used: %s", error)
            return []
    elif not os.path.isdir(heads):
        return []
    return [Found(heads, "they travel with the model")]


def _registered(at_hand: Callable[[], TargetFingerprint]) -> list[Found]:
    """Heads that `ppd fit` has registered for a target, but those whose calibration
    predicts no gain; those first whose calibration predicts most.
    """
    if not _registry().exists():
        return []
    target = at_hand()
    links = _registry(target)
    if target == TargetFingerprint() or not links.exists():
        return []
    folders = sorted(map(os.path.realpath, links.iterdir()))
    # Heads without a calibration have 0
    folders = [folder for folder in folders if not 0 < promise(folder) <= 1]
    folders.sort(key=promise, reverse=True)
    reason = "`ppd fit` made them on this machine"
    if len(folders) > 1:
        reason += f", and their calibration predicts the most of {len(folders)}"
    return [Found(folder, reason) for folder in folders]


def promise(folder: StrPath) -> float:
    """The speedup that the calibration of heads predicts; 0 without one."""
    try:
        parts = load_calibration(folder)
        return recommend(load_config(folder), parts)["predicted_speedup"]
    except (HeadsError, OSError):
        return 0.0


def register(folder: StrPath) -> None:
    """Register heads for their target.

    Raises:
        HeadsError: if their configuration cannot be read, or has no fingerprint.
        OSError: if the registry cannot be written.
    """
    heads = os.path.realpath(folder)
    target = load_config(heads).fingerprint
    if target == TargetFingerprint():
        raise HeadsError(
            "the target has neither a tokenizer.json nor safetensors to know it by"
        )
    links = _registry(target)
    links.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (links / digest_of_value(heads)[:16]).symlink_to(heads)


def _registry(target: TargetFingerprint | None = None) -> Path:
    """The registry's folder, or the folder of a target in it."""
    root = Path(platform.variable("VLLM_CACHE_ROOT")) / "vllm_ppd_heads"
    if target is None:
        return root
    return Path(learned_folder(str(root), target))


def fingerprint_at_hand(model_config: ModelConfig) -> TargetFingerprint:
    """Hashes of the target, as far as its files are on this disk; its tokenizer is
    fetched if it is not.
    """
    model = model_config.model
    on_hub = hub_name(model)
    if on_hub is not None:
        if platform.variable("VLLM_USE_MODELSCOPE"):
            return TargetFingerprint()
        model = str(on_hub._replace(revision=model_config.revision))
    with suppress(HeadsError):  # vLLM reports that a model cannot be fetched
        return fingerprint(folder_of(model, TOKENIZER_NAME))
    return TargetFingerprint()
