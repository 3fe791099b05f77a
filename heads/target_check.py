# SPDX-License-Identifier: Apache-2.0
"""Heads against their target's configuration, without loading the target."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

from vllm_ppd.heads.base import HeadsConfig, Shapes
from vllm_ppd.heads.dynamo.config import DynaMoConfig
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.fingerprint import fingerprint
from vllm_ppd.heads.io import check_target
from vllm_ppd.heads.quote import quoted


def check_on_disk(
    config: HeadsConfig, folder: str | os.PathLike[str], target: str, trust_remote_code: bool = False
) -> bool:
    """Compare heads with a target of this disk.

    Returns:
        Whether the target is here to be compared with.

    Raises:
        HeadsError: on the first difference.
    """
    from transformers import AutoConfig

    try:
        text = AutoConfig.from_pretrained(
            target, local_files_only=True, trust_remote_code=trust_remote_code
        ).get_text_config()
    except (OSError, ValueError):
        return False
    check_target(
        config, folder, hidden_size=text.hidden_size, vocab_size=text.vocab_size,
        num_hidden_layers=text.num_hidden_layers, fingerprint=fingerprint(target),
    )  # fmt: skip
    check_layers(config, folder, text)
    return True


def check_layers(config: HeadsConfig, folder: str | os.PathLike[str], target: Any) -> None:
    """Refuse DynaMo heads whose layers are not those of the target.

    Args:
        config: of the heads; other kinds have no layers.
        folder: the heads folder.
        target: transformers' configuration of the target's text model.

    Raises:
        HeadsError: naming the first tensor that lacks, is unknown, or has another shape.
    """
    expected = decoder_layer(target) if isinstance(config, DynaMoConfig) else None
    if expected is None:
        return
    assert isinstance(config, DynaMoConfig)
    found, where = config.layer_tensors, f"heads in {quoted(os.fspath(folder))}: layer_tensors"
    instead = "use the heads of this model, or train them again"
    for name in sorted({*found, *expected}):
        if name not in found:
            raise HeadsError(f"{where} lacks {quoted(name)}, which a decoder layer of the target has; {instead}")
        if name not in expected:
            raise HeadsError(f"{where} has {quoted(name)}, which a decoder layer of the target lacks; {instead}")
        if found[name] != expected[name]:
            raise HeadsError(
                f"{where}: {quoted(name)} has shape {found[name]}, and {expected[name]} in the target; {instead}"
            )


def decoder_layer(target: Any) -> Shapes | None:
    """Names and shapes of the last decoder layer's tensors, from transformers' model without weights.

    None for a target that transformers cannot build, or whose layers are not where they can be found.
    """
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
