# SPDX-License-Identifier: Apache-2.0
"""A target whose states vLLM computes, on as many GPUs as it needs, before the training
begins. The training holds its embeddings, final norm and LM head alone.
"""

import hashlib
from collections.abc import Collection
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from vllm_ppd.heads.options import TrainingOptions
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

# A path, since heads do not import vLLM
ENGINE = "vllm_ppd.vllm_plugins.engine.generation:StatesEngine"
EXTRACTED = 2  # positions that vLLM needs after a window


class ExtractedTarget(Target):
    """A target without layers."""

    options: TrainingOptions  # of the training
    engine: Any = None  # which computes states; it starts when it is needed

    def adapt(self, config: Any) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()  # it would list the weights that are left out
        text = config.get_text_config()
        text.num_hidden_layers = 0
        if getattr(text, "layer_types", None):
            text.layer_types = []

    def digest(self) -> str:
        """Also of the first row of each stored tensor, since vLLM computes the states."""
        digest = hashlib.sha256(super().digest().encode())
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                for name in names:
                    stored = file.get_slice(name)
                    row = (
                        stored[:1]
                        if stored.get_shape()
                        else file.get_tensor(name)
                    )
                    digest.update(name.encode())
                    digest.update(row.float().numpy().tobytes())
        return digest.hexdigest()

    def compute(
        self, batch: Batch, exits: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        layers = sorted(exits)
        if self.engine is None:
            self.engine = resolve_name(ENGINE)(
                self.options, [*layers, self.num_layers]
            )
        # Positions begin at 0 in every window and document.
        begins = (batch.position_ids.flatten() == 0).nonzero().squeeze(1)
        documents = batch.input_ids.flatten().tensor_split(begins[1:].cpu())
        states = self.engine.states([ids.tolist() for ids in documents])
        read = torch.cat(states).to(self.device, self.dtype)
        *others, last = read.unbind(1)
        return self.norm(last), dict(zip(layers, others, strict=True))

    def close(self) -> None:
        """End the engine."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
