# SPDX-License-Identifier: Apache-2.0
"""The target of heads on this disk: finding it by the name in their `config.json`, and
checking that it matches.

No model is loaded: configuration, vocabulary and a few rows of the LM head tell two
models apart.
"""

import copy
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from safetensors import safe_open

from vllm_ppd.heads.base import HeadsConfig, Shapes, TargetFingerprint
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.text import quoted

# Heads read the LM head; if it is tied, the checkpoint stores the embedding only.
LM_HEAD_NAMES = (
    "lm_head.weight",
    "embed_out.weight",
    "model.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
)
TOKENIZER_NAME = "tokenizer.json"
SAMPLED_ROWS = 64
# As safetensors names them; float32 holds their values exactly
DTYPES = (
    "F32",
    "BF16",
    "F16",
)


def find_target(name: str, folder: str | os.PathLike[str]) -> str:
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
    return (
        name
        if path is None or (_is_model(name) and os.path.samefile(name, path))
        else path
    )


def stored_name(name: str, folder: str | os.PathLike[str]) -> str:
    """The name of the target to store in a heads folder: a relative path only if it
    leads back to the target.
    """
    if os.path.isabs(name) or not _is_model(name):
        return name
    path = _from(folder, name)
    return (
        name
        if path is not None and os.path.samefile(name, path)
        else os.path.abspath(name)
    )


def check_reachable(target: str, folder: str | os.PathLike[str], instead: str) -> None:
    """Refuse a target that is not on this disk and cannot be a name on the Hub
    (offline: is not in its cache).

    Args:
        target: as find_target returned it; empty if the heads do not name it.
        folder: the heads folder.
        instead: how to name another target, for the message.

    Raises:
        HeadsError: naming the target, where it was looked for, and what to do instead.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not target:
        raise HeadsError(
            f"the heads in {quoted(os.fspath(folder))} do not name their target; "
            f"{instead}"
        )
    if _is_model(target):
        return
    try:
        validate_repo_id(target)
        if not constants.HF_HUB_OFFLINE or isinstance(
            try_to_load_from_cache(target, "config.json"), str
        ):
            return
    except HFValidationError:
        pass
    raise HeadsError(
        f"target {quoted(target)} of the heads in {quoted(os.fspath(folder))} was not "
        f"found there, in the folders above, or in the current folder; {instead}"
    )


def _from(folder: str | os.PathLike[str], name: str) -> str | None:
    """The path of a model by that name in a folder or in one above it; None if there is none."""
    here = Path(folder).resolve()
    return next(
        (str(base / name) for base in (here, *here.parents) if _is_model(base / name)),
        None,
    )


def _is_model(path: str | os.PathLike[str]) -> bool:
    return os.path.isfile(os.path.join(path, "config.json"))


def fingerprint(model_folder: str | Path) -> TargetFingerprint:
    """Hash the vocabulary of a model folder on this disk, and rows of its LM head.

    A hash is None if the folder lacks its files.
    """
    folder = Path(model_folder)
    tokenizer = folder / TOKENIZER_NAME
    hashes = tokenizer_hashes(tokenizer) if tokenizer.is_file() else {}
    return TargetFingerprint(**hashes, lm_head=_lm_head_hash(folder))


def tokenizer_hashes(file: Path) -> dict[str, Any]:
    """The tokenizer's field of a fingerprint, from a tokenizer.json.

    The map from tokens to ids is hashed, as versions of transformers write the same
    tokenizer to different files. It is None for a file with another layout.
    """
    try:
        content = json.loads(file.read_bytes())
        known = content["model"]["vocab"]
        if isinstance(known, dict):
            ids = {(number, word) for word, number in known.items()}
        else:
            ids = {(number, word) for number, (word, *_) in enumerate(known)}
        ids |= {
            (token["id"], token["content"])
            for token in content.get("added_tokens") or []
        }
    except (ValueError, TypeError, KeyError):
        return {"vocabulary": None}
    text = json.dumps(sorted(ids))
    return {"vocabulary": hashlib.sha256(text.encode()).hexdigest()}


def _lm_head_hash(folder: Path) -> str | None:
    """The hash of the LM head's shape, dtype, and first and last 64 rows, which are
    read in milliseconds.

    None if the folder has no safetensors, or stores the LM head in an integer or 8-bit
    format.
    """
    import torch

    files = _tensor_files(folder)
    name = next((name for name in LM_HEAD_NAMES if name in files), None)
    if name is None or not (folder / files[name]).is_file():
        return None
    with safe_open(folder / files[name], framework="pt") as file:
        rows = file.get_slice(name)
        shape = rows.get_shape()
        dtype = rows.get_dtype()
        if dtype not in DTYPES:
            return None
        ends = torch.cat([rows[:SAMPLED_ROWS], rows[max(0, shape[0] - SAMPLED_ROWS) :]])
    values = ends.float().numpy().tobytes()
    return hashlib.sha256(f"{shape} {dtype}".encode() + values).hexdigest()


def _tensor_files(model_folder: Path) -> dict[str, str]:
    """The file of each tensor of a safetensors checkpoint, by name; empty without such
    a checkpoint.
    """
    index = model_folder / "model.safetensors.index.json"
    whole = model_folder / "model.safetensors"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    if not whole.is_file():
        return {}
    with safe_open(whole, framework="np") as file:
        return dict.fromkeys(file.keys(), whole.name)


def check_target(
    config: HeadsConfig,
    folder: str | os.PathLike[str],
    *,
    hidden_size: int,
    vocab_size: int,
    num_hidden_layers: int,
    fingerprint: TargetFingerprint,
    strict: bool = False,
) -> str | None:
    """Refuse heads of a target with other sizes or another vocabulary, naming the field
    that differs.

    Args:
        config: of the heads.
        folder: theirs.
        hidden_size, vocab_size, num_hidden_layers: of the target at hand.
        fingerprint: of the target at hand.
        strict: whether to refuse other weights, too. Drafts of a fine-tune or of a copy
            in another dtype are verified, so they need no refusal, but measurements
            belong to the target that the heads name.

    Returns:
        A sentence about other weights, for a warning; None if they are the same, or
        cannot be compared.

    Raises:
        HeadsError: on the first difference.
    """
    sizes = {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_hidden_layers": num_hidden_layers,
    }
    named = quoted(config.verifier)
    other = f"heads in {quoted(str(folder))} were trained for another target ({named})"
    for field, value in sizes.items():
        trained_for = getattr(config.target, field)
        if trained_for not in (0, value):
            problem = f"{field} is {trained_for} there, but {value} in this model"
            raise HeadsError(f"{other}: {problem}; use the heads of this model")
    ours = config.fingerprint
    if _differ(ours.vocabulary, fingerprint.vocabulary):
        raise HeadsError(
            f"{other}: the hash of its vocabulary differs; use the heads of this model"
        )
    if not _differ(ours.lm_head, fingerprint.lm_head):
        return None
    weights = f"{other}: its lm_head has other values (a fine-tune, or a copy in another dtype)"
    if strict:
        raise HeadsError(f"{weights}; use the heads of this model")
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
    folder: str | os.PathLike[str],
    target: str,
    trust_remote_code: bool = False,
    strict: bool = False,
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
    weights = check_target(
        config,
        folder,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_hidden_layers=text.num_hidden_layers,
        fingerprint=fingerprint(target),
        strict=strict,
    )
    check_layers(config, folder, text)
    return weights or ""


def check_layers(
    config: HeadsConfig, folder: str | os.PathLike[str], target: Any
) -> None:
    """Refuse heads with decoder layers that differ from the target's.

    Args:
        config: of the heads; kinds without layers pass.
        folder: the heads folder.
        target: transformers' configuration of the target's text model.

    Raises:
        HeadsError: naming the first tensor that is missing, unknown, or of another
            shape.
    """
    shapes = config.layer_shapes
    expected = None if shapes is None else decoder_layer(target)
    if shapes is None or expected is None:
        return
    for name in sorted({*shapes, *expected}):
        ours = shapes.get(name, "none")
        theirs = expected.get(name, "none")
        if ours != theirs:
            problem = f"layer_tensors: {quoted(name)} has shape {ours}, but {theirs} in the target"
            instead = "use the heads of this model, or train them again"
            raise HeadsError(
                f"heads in {quoted(os.fspath(folder))}: {problem}; {instead}"
            )


def decoder_layer(target: Any) -> Shapes | None:
    """Names and shapes of the last decoder layer's tensors, from a transformers model
    without weights.

    None for a target that transformers cannot build, or whose layers are not found.
    """
    import torch
    from transformers import AutoModelForCausalLM

    target = copy.deepcopy(target)
    if hasattr(target, "quantization_config"):
        del target.quantization_config  # heads are not quantised, even if the target is
    try:
        with torch.device("meta"):
            layers = AutoModelForCausalLM.from_config(target).base_model.layers
        return {
            name: list(tensor.shape) for name, tensor in layers[-1].state_dict().items()
        }
    except (
        Exception
    ):  # may run any family's code; loading the model reports what is wrong
        return None
