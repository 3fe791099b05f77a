# SPDX-License-Identifier: Apache-2.0
"""Heads against their target's configuration, without loading the target."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vllm_ppd.heads.base import HeadsConfig, Shapes
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.fingerprint import fingerprint, tensor_files
from vllm_ppd.heads.io import check_target
from vllm_ppd.heads.quote import quoted

SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")


def check_on_disk(
    config: HeadsConfig, folder: str | os.PathLike[str], target: str, trust_remote_code: bool = False
) -> bool:
    """Compare heads with a target of this disk, by its files alone where these say all; transformers loads in seconds.

    Returns:
        Whether the target is here to be compared with.

    Raises:
        HeadsError: on the first difference.
    """
    sizes = _written_sizes(target)
    text = _text_config(target, trust_remote_code) if sizes is None else None
    if text is not None:
        sizes = {name: getattr(text, name) for name in SIZES}
    if sizes is None:
        return False
    check_target(config, folder, **sizes, fingerprint=fingerprint(target))
    if config.layer_shapes is not None and config.layer_shapes != _stored_layer(target, sizes["num_hidden_layers"]):
        # The checkpoint of some families names or shapes tensors unlike the model.
        text = text or _text_config(target, trust_remote_code)
        if text is not None:
            check_layers(config, folder, text)
    return True


def _written_sizes(target: str) -> dict[str, Any] | None:
    """Sizes that `config.json` of a model folder has; None where the family has other names or places for them."""
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
        return AutoConfig.from_pretrained(
            target, local_files_only=True, trust_remote_code=trust_remote_code
        ).get_text_config()
    except (OSError, ValueError):
        return None


def _stored_layer(target: str, layers: int) -> Shapes:
    """Names and shapes of the last decoder layer's tensors in a model folder's checkpoint; none where it has none."""
    prefix = f".layers.{layers - 1}."
    shapes: Shapes = {}
    try:
        files = {name: file for name, file in tensor_files(Path(target)).items() if prefix in name}
        for path in sorted(set(files.values())):
            with safe_open(Path(target) / path, framework="np") as file:
                names = [name for name, place in files.items() if place == path]
                shapes |= {name.partition(prefix)[2]: file.get_slice(name).get_shape() for name in names}
    except (OSError, ValueError, KeyError, SafetensorError):
        return {}
    return shapes


def check_layers(config: HeadsConfig, folder: str | os.PathLike[str], target: Any) -> None:
    """Refuse heads of decoder layers that are not the target's.

    Args:
        config: of the heads; other kinds have no layers.
        folder: the heads folder.
        target: transformers' configuration of the target's text model.

    Raises:
        HeadsError: naming the first tensor that lacks, is unknown, or has another shape.
    """
    shapes = config.layer_shapes
    expected = None if shapes is None else decoder_layer(target)
    if shapes is None or expected is None:
        return
    where = f"heads in {quoted(os.fspath(folder))}: layer_tensors"
    instead = "use the heads of this model, or train them again"
    for name in sorted({*shapes, *expected}):
        if name not in shapes:
            raise HeadsError(f"{where} lacks {quoted(name)}, which a decoder layer of the target has; {instead}")
        if name not in expected:
            raise HeadsError(f"{where} has {quoted(name)}, which a decoder layer of the target lacks; {instead}")
        if shapes[name] != expected[name]:
            raise HeadsError(
                f"{where}: {quoted(name)} has shape {shapes[name]}, and {expected[name]} in the target; {instead}"
            )


def decoder_layer(target: Any) -> Shapes | None:
    """Names and shapes of the last decoder layer's tensors, from transformers' model without weights.

    None for a target that transformers cannot build, or whose layers are not where they can be found.
    """
    import torch
    from transformers import AutoModelForCausalLM

    target = copy.deepcopy(target)
    if hasattr(target, "quantization_config"):
        del target.quantization_config  # heads are not quantised, whatever the target is
    try:
        with torch.device("meta"):
            layers = AutoModelForCausalLM.from_config(target).base_model.layers
        return {name: list(tensor.shape) for name, tensor in layers[-1].state_dict().items()}
    except Exception:  # any code of any family: what is wrong with it is for whoever loads it to say
        return None
