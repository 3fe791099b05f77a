# SPDX-License-Identifier: Apache-2.0
"""The target of heads on this disk: finding it by the name in their `config.json`, and checking that it matches.

No model is loaded: configuration, tokenizer and a few rows of the LM head tell two models apart.
"""

import copy
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from vllm_ppd.heads.base import HeadsConfig, Shapes, TargetFingerprint
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.quote import quoted
from vllm_ppd.heads.raw_tensors import raw_tensors, rounded

# Heads read the LM head; if it is tied, the checkpoint stores the embedding only.
LM_HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "model.embed_tokens.weight", "gpt_neox.embed_in.weight")
TOKENIZER_NAME = "tokenizer.json"
SAMPLED_ROWS = 64
DTYPES = ("F32", "BF16", "F16")  # as safetensors names them; float32 holds their values exactly
SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")


def find_target(name: str, folder: str | os.PathLike[str]) -> str:
    """The path or name by which to load the target that heads name.

    A relative path is looked up in the heads' folder and the folders above it, so that it travels with a checkout, and
    then in the current folder.

    Args:
        name: `name_or_path` of the heads' verifier.
        folder: the heads folder.

    Returns:
        The name itself if it leads to a model from here, or to nothing (it may be a name on the Hub); else a path.
    """
    path = _from(folder, name) if name else None
    return name if path is None or (_is_model(name) and os.path.samefile(name, path)) else path


def stored_name(name: str, folder: str | os.PathLike[str]) -> str:
    """The name of the target to store in a heads folder: a relative path only if it leads back to the target."""
    if os.path.isabs(name) or not _is_model(name):
        return name
    path = _from(folder, name)
    return name if path is not None and os.path.samefile(name, path) else os.path.abspath(name)


def check_reachable(target: str, folder: str | os.PathLike[str], instead: str) -> None:
    """Refuse a target that is not on this disk and cannot be a name on the Hub (offline: is not in its cache).

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
        raise HeadsError(f"the heads in {quoted(os.fspath(folder))} do not name their target; {instead}")
    if _is_model(target):
        return
    try:
        validate_repo_id(target)
        if not constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(target, "config.json"), str):
            return
    except HFValidationError:
        pass
    raise HeadsError(
        f"target {quoted(target)} of the heads in {quoted(os.fspath(folder))} was not found there, in the folders "
        f"above, or in the current folder; {instead}"
    )


def _from(folder: str | os.PathLike[str], name: str) -> str | None:
    """The path of a model by that name in a folder or in one above it; None if there is none."""
    here = Path(folder).resolve()
    return next((str(base / name) for base in (here, *here.parents) if _is_model(base / name)), None)


def _is_model(path: str | os.PathLike[str]) -> bool:
    return os.path.isfile(os.path.join(path, "config.json"))


def fingerprint(model_folder: str | Path) -> TargetFingerprint:
    """Hash the tokenizer file, its vocabulary, and rows of the LM head of a model folder on this disk.

    The LM head's hash covers its shape, dtype, first and last 64 rows: enough to tell two models apart, and read
    in milliseconds from files of any size. A hash is None if the folder lacks its files, or if the LM head's dtype
    is not float32, bfloat16 or float16.
    """
    folder = Path(model_folder)
    tokenizer = folder / TOKENIZER_NAME
    return TargetFingerprint(
        **(tokenizer_hashes(tokenizer) if tokenizer.is_file() else {}),
        **_lm_head_hashes(folder),
        folder=str(folder),
    )


def tokenizer_hashes(file: Path) -> dict[str, Any]:
    """The tokenizer's fields of a fingerprint, from a tokenizer.json."""
    content = file.read_bytes()
    return {"tokenizer": hashlib.sha256(content).hexdigest(), "vocabulary": _vocabulary_hash(content)}


def _vocabulary_hash(tokenizer: bytes) -> str | None:
    """The hash of a tokenizer.json's vocabulary; None for a file with another layout."""
    try:
        content = json.loads(tokenizer)
        known, added = content["model"]["vocab"], content.get("added_tokens") or []
        words = list(known.items()) if isinstance(known, dict) else [(word, i) for i, (word, *_) in enumerate(known)]
        words += [(token["content"], token["id"]) for token in added]
        text = json.dumps(sorted({(int(number), str(word)) for word, number in words}))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def _sampled_rows(folder: Path) -> tuple[list[int], str, np.ndarray] | None:
    """Shape and dtype of a model folder's LM head, and its first and last rows in float32; None if it has none."""
    files = _tensor_files(folder)
    name = next((name for name in LM_HEAD_NAMES if name in files), None)
    if name is None or not (folder / files[name]).is_file():
        return None
    with safe_open(folder / files[name], framework="np") as file:
        rows = file.get_slice(name)
        shape, dtype = rows.get_shape(), rows.get_dtype()
    if dtype not in DTYPES:
        return None
    stored = raw_tensors(folder / files[name], [name])[name]
    both_ends = np.concatenate([stored.bits[:SAMPLED_ROWS], stored.bits[max(0, shape[0] - SAMPLED_ROWS) :]])
    return shape, dtype, stored._replace(bits=both_ends).float32()


def _lm_head_hashes(folder: Path) -> dict[str, Any]:
    sample = _sampled_rows(folder)
    if sample is None:
        return {}
    shape, dtype, sampled = sample

    def digest(of: str, values: np.ndarray) -> str:
        return hashlib.sha256(f"{shape} {of}".encode() + values.tobytes()).hexdigest()

    copies = {dtype: rounded(sampled, dtype) for dtype in DTYPES}
    return {
        "lm_head": digest(dtype, sampled),
        "lm_head_bfloat16": digest("BF16", copies["BF16"]),
        "same_values": frozenset(digest(dtype, sampled) for dtype in DTYPES),
        "rounded": frozenset(digest(dtype, copies[dtype]) for dtype in DTYPES if dtype != "F32"),
    }


def _tensor_files(model_folder: Path) -> dict[str, str]:
    """The file of each tensor of a safetensors checkpoint, by name; empty without such a checkpoint."""
    index, whole = model_folder / "model.safetensors.index.json", model_folder / "model.safetensors"
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
    """Refuse heads of a target with other sizes or another vocabulary, naming the field that differs.

    Args:
        config: of the heads.
        folder: theirs.
        hidden_size, vocab_size, num_hidden_layers: of the target at hand.
        fingerprint: of the target at hand.
        strict: whether to refuse other weights, too. Drafts of a fine-tune or of a copy in another dtype are verified,
            so they need no refusal, but measurements belong to the target that the heads name.

    Returns:
        A sentence about other weights, for a warning; None if they are the same, or cannot be compared.

    Raises:
        HeadsError: on the first difference.
    """
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "num_hidden_layers": num_hidden_layers}
    differences = [
        f"{field} is {trained_for} there, but {value} in this model"
        for field, value in sizes.items()
        if (trained_for := getattr(config.target, field)) not in (0, value)
    ]
    difference = differences[0] if differences else config.fingerprint.difference(fingerprint)
    other = f"heads in {quoted(str(folder))} were trained for another target ({quoted(config.verifier)})"
    if difference:
        raise HeadsError(f"{other}: {difference}; use the heads of this model")
    weights = config.fingerprint.other_weights(fingerprint)
    if weights is None:
        return None
    if strict:
        raise HeadsError(f"{other}: {weights}; use the heads of this model")
    return (
        f"{other}: {weights}{_how_much(config, folder, fingerprint)}. Drafts are verified, so the output is right, but "
        "fewer may be accepted than calibrated"
    )


def _how_much(config: HeadsConfig, folder: str | os.PathLike[str], target: TargetFingerprint) -> str:
    """By how much two LM heads differ, in words, if the target that the heads name is on this disk, too."""
    trained = find_target(config.verifier, folder)
    if target.folder is None or not _is_model(trained):
        return ""
    try:
        ours, theirs = _sampled_rows(Path(trained)), _sampled_rows(Path(target.folder))
    except (OSError, ValueError, KeyError, SafetensorError):
        return ""
    if ours is None or theirs is None or ours[0] != theirs[0]:
        return ""
    distance = np.linalg.norm(theirs[2] - ours[2]) / np.linalg.norm(ours[2])
    return f", sampled rows differ by {100 * distance:.2g} %"


def check_on_disk(
    config: HeadsConfig,
    folder: str | os.PathLike[str],
    target: str,
    trust_remote_code: bool = False,
    strict: bool = False,
) -> str | None:
    """Compare heads with a target on this disk, by its files alone if possible, as transformers takes seconds to load.

    Returns:
        A sentence about other weights (as check_target), empty if there is none; None if the target is not on this
        disk.

    Raises:
        HeadsError: on the first difference.
    """
    if not target:
        return None
    sizes = _written_sizes(target)
    text = _text_config(target, trust_remote_code) if sizes is None else None
    if text is not None:
        sizes = {name: getattr(text, name) for name in SIZES}
    if sizes is None:
        return None
    weights = check_target(config, folder, **sizes, fingerprint=fingerprint(target), strict=strict)
    if config.layer_shapes is not None and config.layer_shapes != _stored_layer(target, sizes["num_hidden_layers"]):
        # In some families the checkpoint's tensors have other names or shapes than the model's.
        text = text or _text_config(target, trust_remote_code)
        if text is not None:
            check_layers(config, folder, text)
    return weights or ""


def _written_sizes(target: str) -> dict[str, Any] | None:
    """Sizes in the `config.json` of a model folder; None if the family stores them under other names."""
    try:
        data = json.loads((Path(target) / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    written = {name: data.get(name) for name in SIZES} if isinstance(data, dict) and "text_config" not in data else {}
    return written if written and all(type(value) is int for value in written.values()) else None


def _text_config(target: str, trust_remote_code: bool) -> Any:
    """transformers' configuration of the text model; None if it is not on this disk."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(target, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None
    return config.get_text_config()


def _stored_layer(target: str, layers: int) -> Shapes:
    """Names and shapes of the last decoder layer's tensors in a model folder's checkpoint; empty if there are none."""
    prefix = f".layers.{layers - 1}."
    shapes: Shapes = {}
    try:
        files = {name: file for name, file in _tensor_files(Path(target)).items() if prefix in name}
        for path in set(files.values()):
            with safe_open(Path(target) / path, framework="np") as file:
                names = [name for name, place in files.items() if place == path]
                shapes |= {name.partition(prefix)[2]: file.get_slice(name).get_shape() for name in names}
    except (OSError, ValueError, KeyError, SafetensorError):
        return {}
    return shapes


def check_layers(config: HeadsConfig, folder: str | os.PathLike[str], target: Any) -> None:
    """Refuse heads with decoder layers that differ from the target's.

    Args:
        config: of the heads; kinds without layers pass.
        folder: the heads folder.
        target: transformers' configuration of the target's text model.

    Raises:
        HeadsError: naming the first tensor that is missing, unknown, or of another shape.
    """
    shapes = config.layer_shapes
    expected = None if shapes is None else decoder_layer(target)
    if shapes is None or expected is None:
        return
    for name in sorted({*shapes, *expected}):
        if name not in shapes:
            problem = f" does not have {quoted(name)}, which a decoder layer of the target has"
        elif name not in expected:
            problem = f" has {quoted(name)}, which a decoder layer of the target does not have"
        elif shapes[name] != expected[name]:
            problem = f": {quoted(name)} has shape {shapes[name]}, but {expected[name]} in the target"
        else:
            continue
        where = f"heads in {quoted(os.fspath(folder))}: layer_tensors"
        raise HeadsError(f"{where}{problem}; use the heads of this model, or train them again")


def decoder_layer(target: Any) -> Shapes | None:
    """Names and shapes of the last decoder layer's tensors, from a transformers model without weights.

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
        return {name: list(tensor.shape) for name, tensor in layers[-1].state_dict().items()}
    except Exception:  # may run any family's code; loading the model reports what is wrong
        return None
