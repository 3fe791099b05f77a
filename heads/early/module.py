# SPDX-License-Identifier: Apache-2.0
"""Early heads, which read a draft token from the hidden state at an exit layer."""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.module import NamedWeights


class EarlyHeads(NamedWeights):
    """One head per exit layer, over the hidden state at the exit after the target's
    final norm.

    transform:  E^(i) = E* T^(i) (ParaDecode, section 2.1). E* is the target's own LM
                head and is not stored here; T = identity is the untrained exit ("N" in
                PPD's Table 2).
    classifier: a whole E^(i) of its own (PPD's rows "Y"): V x d numbers per exit.

    Args:
        config: of the heads.
        tensors: by the configuration's names.
    """

    def __init__(
        self, config: EarlyConfig, tensors: Mapping[str, Tensor]
    ) -> None:
        super().__init__(config, tensors)
        self.exit_layers = tuple(config.exit_layers)
        self.form = config.head

    def weight(self, exit_layer: int) -> Tensor:
        """T^(i) [hidden, hidden], or a classifier [vocabulary, hidden]."""
        return self.weights[f"exit/{exit_layer}/{self.form}"]

    def forward(
        self,
        hidden: Tensor,  # [rows, hidden], normed
        exit_layer: int,
    ) -> Tensor:
        """T^(i) h for the target's LM head [rows, hidden], or a classifier's logits
        [rows, vocabulary].
        """
        return functional.linear(hidden, self.weight(exit_layer))
