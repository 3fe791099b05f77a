# SPDX-License-Identifier: Apache-2.0
"""The target as training sees it: a causal LM of transformers, frozen, whose states are read where heads attach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_ppd.heads.base import TargetLayers
from vllm_ppd.heads.fingerprint import fingerprint
from vllm_ppd.heads.training import TrainingError
from vllm_ppd.heads.training.packed_attention import packed_attention
from vllm_ppd.heads.training.tokens import Batch

LAYER_NAMES = ("layers", "h")
NORM_NAMES = ("norm", "final_layer_norm", "ln_f", "final_layernorm")


@dataclass
class TargetStates:
    """What one forward pass leaves for the heads. A row is a token: [rows, hidden]."""

    final: torch.Tensor  # after the final norm: what the LM head reads
    exits: dict[int, torch.Tensor] = field(default_factory=dict)  # after that many layers and the final norm
    stem: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # what the last decoder layer was called with


class Target:
    """A causal LM folder or hub name, loaded by transformers.

    Args:
        name: folder or hub name.
        device, dtype: where and in what it runs.
        trust_remote_code: run code that comes with the model.
        trainable: keep gradients (DynaMo's full recipe); otherwise the target is frozen and stays what it was.

    Raises:
        TrainingError: if transformers cannot load it, or its parts are not where they can be found.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        trainable: bool = False,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation=packed_attention(device)
            )
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise TrainingError(f"cannot load model {name!r}: {reason}") from None
        self.name, self.device, self.dtype = name, device, dtype
        model: torch.nn.Module = self.model
        model.to(device).eval().requires_grad_(trainable)
        self.trainable = trainable
        base = self.model.base_model
        self.layers: nn.ModuleList = _part(base, LAYER_NAMES, name)
        self.norm: nn.Module = _part(base, NORM_NAMES, name)
        config = self.model.config.get_text_config()
        for cap in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(config, cap, None) not in (None, 1, 1.0):
                raise TrainingError(f"model {name!r} changes its logits ({cap}), which heads do not support yet")
        self.config = config
        self.num_layers, self.hidden_size = len(self.layers), config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_length = getattr(config, "max_position_embeddings", None)

    @property
    def unembedding(self) -> torch.Tensor:
        """E*: [vocabulary, hidden]."""
        return self.model.get_output_embeddings().weight[: self.vocab_size]

    @property
    def bias(self) -> torch.Tensor | None:
        return getattr(self.model.get_output_embeddings(), "bias", None)

    def run(self, batch: Batch, exits: Sequence[int] = (), stem: bool = False) -> TargetStates:
        """One forward pass over packed windows, hidden states flattened to rows.

        Args:
            batch: the windows.
            exits: layer counts after which the state is wanted, normed.
            stem: keep the call of the last decoder layer, for heads that run beside it.
        """
        caught: dict[int, torch.Tensor] = {}
        states = TargetStates(final=torch.empty(0))
        hooks = [self.layers[layer - 1].register_forward_hook(_catch(caught, layer)) for layer in exits]
        if stem:

            def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                states.stem = (args, kwargs)

            hooks.append(self.layers[-1].register_forward_pre_hook(keep, with_kwargs=True))
        try:
            with torch.set_grad_enabled(self.trainable and torch.is_grad_enabled()):
                output = self.model.base_model(
                    input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
                )
                states.final = output.last_hidden_state.flatten(0, 1)
                states.exits = {layer: self.norm(caught[layer]).flatten(0, 1) for layer in exits}
        finally:
            for hook in hooks:
                hook.remove()
        return states

    def description(self) -> dict[str, Any]:
        """What a heads config says of its target."""
        return {
            "verifier": self.name,
            "target": TargetLayers(
                model_type=self.config.model_type,
                hidden_size=self.hidden_size,
                vocab_size=self.vocab_size,
                num_hidden_layers=self.num_layers,
            ),
            "fingerprint": fingerprint(self.folder),
        }

    @property
    def folder(self) -> Path:
        """The folder of the weights on this disk."""
        if Path(self.name).is_dir():
            return Path(self.name)
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(self.name, local_files_only=True))


def _part(base: nn.Module, names: Sequence[str], model: str) -> Any:
    for name in names:
        if hasattr(base, name):
            return getattr(base, name)
    raise TrainingError(f"model {model!r} ({type(base).__name__}) has none of {', '.join(names)}: cannot attach heads")


def _catch(caught: dict[int, torch.Tensor], layer: int) -> Any:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        caught[layer] = output[0] if isinstance(output, tuple) else output

    return hook
