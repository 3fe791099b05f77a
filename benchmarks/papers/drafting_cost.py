# SPDX-License-Identifier: Apache-2.0
"""What drafts cost, counted: the weights that they read, in passes of the target, which read all of its weights once.

Where a step is bound by memory, as at batch 1, this is their time; kernel launches and the host's work are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.dynamo.config import DynaMoConfig
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.io import HeadsError, load_config
from vllm_ppd.heads.planning.machine import weights_of
from vllm_ppd.vllm_plugins.registry import METHODS


def costs(everyone: Iterable[Contender], target: str, trust_remote_code: bool = False) -> dict[str, float]:
    """Weights that the drafts of a step read, over those of a pass.

    Args:
        everyone: contenders, the number of drafts in their speculative_config.
        target: folder.
        trust_remote_code: run code that comes with the target.

    Returns:
        Passes by the contender's name: of heads, EAGLE, Medusa and n-gram; of none if the target is not on this disk,
        or is a mixture of experts.
    """
    from transformers import AutoConfig

    try:
        (layer, _), (lm_head, _) = weights_of(target)
    except HeadsError:
        return {}
    config = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code).get_text_config()
    of_a_pass = config.num_hidden_layers * layer + lm_head
    drafting = [(one.name, one.speculative_config) for one in everyone if one.speculative_config is not None]
    found = {name: _read(options, layer, lm_head, config.vocab_size) for name, options in drafting}
    return {name: round(read / of_a_pass, 4) for name, read in found.items() if read is not None}


def _read(config: dict[str, Any], layer: float, lm_head: float, vocab_size: int) -> float | None:
    """Numbers that the drafts of a speculative_config read; None where that is not counted here."""
    n, method, folder = config.get("num_speculative_tokens", 0), config.get("method"), config.get("model")
    if method == "ngram":
        return 0.0
    if folder is None:
        return None
    if method == "eagle":  # its layer and the LM head, token by token
        return n * (_own_weights(folder, vocab_size) + lm_head)
    if method == "medusa":  # a block and an LM head each
        return _own_weights(folder, vocab_size) + n * lm_head
    if method not in (None, *METHODS):
        return None
    heads = load_config(folder)
    rows = lm_head * config.get("draft_vocab_size", heads.draft_vocab_size or vocab_size) / vocab_size
    if isinstance(heads, EarlyConfig):
        exit_layer = config.get("exit_layer", heads.serving_exits[0])
        transform = heads.target.hidden_size**2 if heads.head == "transform" else 0
        return n * (exit_layer * layer + transform + rows) if isinstance(exit_layer, int) else None
    if isinstance(heads, DynaMoConfig):
        layers = sum(math.prod(shape) for name, shape in heads.shapes().items() if not heads.is_count(name))
        return layers * n / (heads.tokens - 1) + rows
    return _cp(heads, n, rows) if isinstance(heads, CPConfig) and heads.factorised else None


def _cp(heads: CPConfig, n: int, rows: float) -> float:
    """A matrix an expert and position, one a position for each token that is read, and the mixture's weights."""
    size, none, chain = heads.target.hidden_size, heads.condition == "none", heads.condition == "chain"
    matrices = (n + 1) * heads.rank if none else n * heads.rank + n + chain * (n - 1)
    gates = (1 if none else 2) * heads.rank * size
    # The draft before must be known for the next one.
    return float(matrices * size**2 + gates + (n if chain else 1) * rows)


def _own_weights(folder: str, vocab_size: int) -> float:
    """Numbers of a peer's checkpoint, apart from embeddings and LM heads."""
    from safetensors import safe_open

    numbers = 0
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(str(file), "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                shape = opened.get_slice(name).get_shape()
                numbers += 0 if vocab_size in shape else math.prod(shape)
    return float(numbers)
