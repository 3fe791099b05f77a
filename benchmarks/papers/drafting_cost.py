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


def costs(everyone: Iterable[Contender], target: str) -> dict[str, float]:
    """`passes` of each contender, those left out that cannot be counted."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target).get_text_config()
    try:
        found = {one.name: passes(one, target, config.num_hidden_layers, config.vocab_size) for one in everyone}
    except HeadsError:  # a target that is not on this disk, or a mixture of experts
        return {}
    return {name: round(cost, 4) for name, cost in found.items() if cost is not None}


def passes(contender: Contender, target: str, num_layers: int, vocab_size: int) -> float | None:
    """Weights that the drafts of a step read, over those of a pass.

    Args:
        contender: its speculative_config names a method of vLLM or a heads folder, and the number of drafts.
        target: folder.
        num_layers, vocab_size: of the target.

    Returns:
        None for vLLM alone, and for methods whose drafts are not counted here.

    Raises:
        HeadsError: if the target's weights are not on this disk, or it is a mixture of experts.
    """
    config = contender.speculative_config
    if config is None:
        return None
    (layer, _), (lm_head, _) = weights_of(target)
    read = _read(config, layer, lm_head, vocab_size)
    return None if read is None else read / (num_layers * layer + lm_head)


def _read(config: dict[str, Any], layer: float, lm_head: float, vocab_size: int) -> float | None:
    """Numbers that n drafts read."""
    n, method, folder = config["num_speculative_tokens"], config.get("method"), config.get("model")
    if method == "ngram":
        return 0.0
    if folder is None:
        return None
    if method == "eagle":  # its layer and the LM head, token by token
        return float(n * (_own_weights(folder, vocab_size) + lm_head))
    if method == "medusa":  # a block and an LM head each
        return _own_weights(folder, vocab_size) + n * lm_head
    heads = load_config(folder)
    rows = lm_head * config.get("draft_vocab_size", heads.draft_vocab_size or vocab_size) / vocab_size
    if isinstance(heads, EarlyConfig):
        transform = _own_weights(folder, vocab_size) / len(heads.exit_layers)
        return float(n * (heads.serving_exits[0] * layer + transform + rows))
    if isinstance(heads, DynaMoConfig):
        return _own_weights(folder, vocab_size) * n / (heads.tokens - 1) + rows
    return _cp(heads, n, rows) if isinstance(heads, CPConfig) and heads.factorised else None


def _cp(heads: CPConfig, n: int, rows: float) -> float:
    """A matrix an expert and position, one a position for each token that is read, and the mixture's weights."""
    size, none, chain = heads.target.hidden_size, heads.condition == "none", heads.condition == "chain"
    matrices = (n + 1) * heads.rank if none else n * heads.rank + n + chain * (n - 1)
    gates = (1 if none else 2) * heads.rank * size
    # The draft before must be known for the next one.
    return float(matrices * size**2 + gates + (n if chain else 1) * rows)


def _own_weights(folder: str, vocab_size: int) -> float:
    """Numbers of a checkpoint, apart from embeddings, LM heads and counts."""
    from safetensors import safe_open

    numbers = 0
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(str(file), "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                part = opened.get_slice(name)
                shape = part.get_shape()
                if "F" in part.get_dtype() and vocab_size not in shape:
                    numbers += math.prod(shape)
    return float(numbers)
