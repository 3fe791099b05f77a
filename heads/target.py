# SPDX-License-Identifier: Apache-2.0
"""The target of heads on this disk: finding it by the name in their `config.json`, and
checking that it matches.

No model is loaded: configuration, vocabulary and a few rows of the LM head tell two
models apart.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vllm_ppd.heads.base import HeadsConfig, TargetFingerprint
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import digest_of_value, named
from vllm_ppd.heads.text import StrPath, quoted

# Heads read the LM head; if it is tied, the checkpoint stores the embedding only.
LM_HEAD_NAMES = (
    "lm_head.weight",
    "embed_out.weight",
    "model.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
    # Of multimodal models
    "language_model.lm_head.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
TOKENIZER_NAME = "tokenizer.json"
SAMPLED_ROWS = 64
# As safetensors names them; float32 holds their values exactly
DTYPES = ("F32", "BF16", "F16")


def find_target(name: str, folder: StrPath) -> str:
    """The path or name by which to load the target that heads name.

    A relative path is looked up in the heads' folder and the folders above it, so that
    it travels with a checkout, and then in the current folder.

    Args:
        name: `name_or_path` of the heads' verifier.
        folder: the heads folder.

    Returns:
        The name itself if it leads to a model from here, or to nothing (it may be a
        name on the Hub); else a path.
    """
    path = _from(folder, name) if name else None
    if path is None or (_is_model(name) and os.path.samefile(name, path)):
        return name
    return path


def stored_name(name: str, folder: StrPath) -> str:
    """The name of the target to store in a heads folder: a relative path only if it
    leads back to the target.
    """
    if os.path.isabs(name) or not _is_model(name):
        return name
    path = _from(folder, name)
    is_found = path is not None and os.path.samefile(name, path)
    return name if is_found else os.path.abspath(name)


def check_reachable(target: str, folder: StrPath, instead: str) -> None:
    """Refuse a target that is not on this disk and cannot be a name on the Hub
    (offline: is not in its cache).

    Args:
        target: as find_target returned it; empty if the heads do not name it.
        folder: the heads folder.
        instead: how to name another target, for the message.

    Raises:
        HeadsError: naming the target, where it was looked for, and what to do instead.
    """
    heads = f"the heads in {quoted(os.fspath(folder))}"
    if not target:
        raise HeadsError(f"{heads} do not name their target; {instead}")
    if not _is_model(target) and not _may_be_on_hub(target):
        raise HeadsError(
            f"target {quoted(target)} of {heads} was not found there, in the folders "
            f"above, or in the current folder; {instead}"
        )


def _may_be_on_hub(name: str) -> bool:
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return False
    return not constants.HF_HUB_OFFLINE or isinstance(cached, str)


def _from(folder: StrPath, name: str) -> str | None:
    """The path of a model by that name in a folder or in one above it; None if there is none."""
    here = Path(folder).resolve()
    for base in (here, *here.parents):
        if _is_model(base / name):
            return str(base / name)
    return None


def _is_model(path: StrPath) -> bool:
    return os.path.isfile(os.path.join(path, "config.json"))


def fingerprint(model_folder: StrPath) -> TargetFingerprint:
    """Hash the vocabulary of a model folder on this disk, and rows of its LM head.

    A hash is None if the folder lacks its files.
    """
    folder = Path(model_folder)
    return TargetFingerprint(
        vocabulary=vocabulary_hash(folder / TOKENIZER_NAME),
        lm_head=_lm_head_hash(folder),
    )


def vocabulary_hash(tokenizer: Path) -> str | None:
    """The hash of the map from tokens to ids in a tokenizer.json.

    Versions of transformers write the same tokenizer to different files. It is None for
    a file that is missing or has another layout.
    """
    try:
        content = json.loads(tokenizer.read_bytes())
        known = content["model"]["vocab"]
        if isinstance(known, dict):
            ids = {(number, word) for word, number in known.items()}
        else:
            ids = {(number, word) for number, (word, *_) in enumerate(known)}
        for token in content.get("added_tokens") or []:
            ids.add((token["id"], token["content"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return digest_of_value(sorted(ids))


def _lm_head_hash(folder: Path) -> str | None:
    """The hash of the LM head's shape, dtype, and first and last 64 rows, which are
    read in milliseconds.

    None if the folder has no safetensors, or stores the LM head in an integer or 8-bit
    format.
    """
    import torch

    files: dict[str, Path] = {}
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except SafetensorError as error:
            raise HeadsError(
                f"{named(path)} is not whole safetensors ({error}); fetch it again"
            ) from None
    name = next((name for name in LM_HEAD_NAMES if name in files), None)
    if name is None:
        return None
    with safe_open(files[name], framework="pt") as file:
        rows = file.get_slice(name)
        shape = rows.get_shape()
        dtype = rows.get_dtype()
        if dtype not in DTYPES:
            return None
        ends = torch.cat(
            [rows[:SAMPLED_ROWS], rows[max(0, shape[0] - SAMPLED_ROWS) :]]
        )
    values = ends.float().numpy().tobytes()
    return hashlib.sha256(f"{shape} {dtype}".encode() + values).hexdigest()


def check_target(
    config: HeadsConfig,
    folder: StrPath,
    target: Any,
    fingerprint: TargetFingerprint,
    strict: bool = False,
) -> str | None:
    """Compare heads with a target.

    Args:
        config: of the heads.
        folder: the heads folder, for the message.
        target: transformers' configuration of the target's text model.
        fingerprint: of the target.
        strict: refuse another LM head. Drafts of a fine-tune or of a copy in another
            dtype need no refusal if they are verified.

    Returns:
        A sentence about other weights, for a warning; None if they are the same, or
        cannot be compared.

    Raises:
        HeadsError: on the first difference.
    """
    other = (
        f"heads in {quoted(str(folder))} were trained for another target "
        f"({quoted(config.verifier)})"
    )
    instead = "use the heads of this model"
    for field in ("hidden_size", "vocab_size", "num_hidden_layers"):
        theirs = getattr(target, field)
        ours = getattr(config.target, field)
        if ours not in (0, theirs):
            problem = f"{field} is {ours} there, but {theirs} in this model"
            raise HeadsError(f"{other}: {problem}; {instead}")
    if _differ(config.fingerprint.vocabulary, fingerprint.vocabulary):
        raise HeadsError(
            f"{other}: the hash of its vocabulary differs; {instead}"
        )
    if not _differ(config.fingerprint.lm_head, fingerprint.lm_head):
        return None
    weights = (
        f"{other}: its lm_head has other values (a fine-tune, or a copy in another "
        "dtype)"
    )
    if strict:
        raise HeadsError(f"{weights}; {instead}")
    return (
        f"{weights}. Drafts are verified, so the output is right, but fewer may be "
        "accepted than calibrated"
    )


def _differ(ours: str | None, theirs: str | None) -> bool:
    """Whether two hashes differ; one of them may not be recorded, or of a target not on
    this disk yet.
    """
    return bool(ours and theirs and ours != theirs)


def check_on_disk(
    config: HeadsConfig,
    folder: StrPath,
    target: str,
    trust_remote_code: bool = False,
) -> str | None:
    """Compare heads with a target on this disk, by its files alone.

    Returns:
        A sentence about other weights (as check_target), empty if there is none; None
        if the target is not on this disk.

    Raises:
        HeadsError: on the first difference.
    """
    from transformers import AutoConfig

    if not target:
        return None
    try:
        text = AutoConfig.from_pretrained(
            target, local_files_only=True, trust_remote_code=trust_remote_code
        ).get_text_config()
    except (OSError, ValueError):
        return None
    return check_target(config, folder, text, fingerprint(target)) or ""
