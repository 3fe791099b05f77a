# SPDX-License-Identifier: Apache-2.0
"""Small heads folders of every kind for the tiny llama, made without training."""

from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModel

from vllm_ppd.heads.base import HeadsConfig, TargetLayers
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.cp.module import CPHead, draft_in_sequence, initial_tensors
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.folder import save_heads
from vllm_ppd.heads.kinds import KINDS as ALL_KINDS
from vllm_ppd.heads.target import fingerprint
from vllm_ppd.kernels.cp_mixture import conditional_log_probs, draft_chain
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import UNLIMITED, Sampling

KINDS = ("early", "cp", "dynamo", "recurrent")
OF_DEMO = KINDS[:3]  # that the demo model ships with


def layer_shapes(model: Path) -> dict[str, list[int]]:
    """Shapes by name of a decoder layer's tensors."""
    with torch.device("meta"):
        made = AutoModel.from_config(AutoConfig.from_pretrained(model))
    layer = made.layers[-1].state_dict()
    return {name: list(tensor.shape) for name, tensor in layer.items()}


def config_of(
    kind: str, model: Path, sizes: dict[str, int] | None = None, **changes: Any
) -> HeadsConfig:
    """A configuration for a tiny llama; `sizes` replace some of the target's."""
    layers = {
        "hidden_size": 64,
        "vocab_size": tiny.VOCAB,
        "num_hidden_layers": tiny.LAYERS,
        **(sizes or {}),
    }
    given: dict[str, Any] = {
        "verifier": str(model),
        "target": TargetLayers(model_type="llama", **layers),
        "num_speculative_tokens": 2,
        "fingerprint": fingerprint(model),
    }
    if kind == "early":
        given |= {"exit_layers": [2, 4], "default_exit_layers": [4]}
    elif kind == "cp":
        given |= {"positions": 3, "rank": 2, "token_counts": True}
    elif kind == "recurrent":
        given |= {
            "target": given["target"].model_dump(),
            "vocab_size": layers["vocab_size"],
            "emb_dim": layers["hidden_size"],
            "inner_dim": 16,
            "n_predict": 2,
            "token_counts": True,
        }
    else:
        given |= {
            "tokens": 3,
            "layer_tensors": layer_shapes(model),
            "cooccurrence_entries": {2: 4, 3: 4},
        }
    return ALL_KINDS[kind](**given | changes)


def blank_tensors(
    config: HeadsConfig, fill: float = 0.0
) -> dict[str, torch.Tensor]:
    """Weights of one value, and the counts of a corpus that has every token once and
    each n-gram once.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in config.shapes().items():
        if not config.is_count(name):
            tensors[name] = torch.full(shape, fill)
        elif name.endswith(".keys"):
            tensors[name] = torch.arange(shape[0])
        else:
            count = config.target.vocab_size if name.endswith("totals") else 1
            tensors[name] = torch.full(shape, count, dtype=torch.int32)
    return tensors


def make_heads(
    folder: Path,
    kind: str,
    model: Path,
    sizes: dict[str, int] | None = None,
    **changes: Any,
) -> Path:
    """Write a heads folder, its weights small."""
    config = config_of(
        kind,
        model,
        sizes,
        **changes,
    )
    save_heads(folder, config, blank_tensors(config, 0.01))
    return folder


def log_likelihood(
    head: CPHead,
    hidden: torch.Tensor,  # [rows, d]
    tokens: torch.Tensor,  # [rows, factors], those that the factors predict
    unembedding: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    context: torch.Tensor | None = None,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The joint's log-likelihood [rows] (CP, eq. 9), and its chain log P(x_s |
    x_1..x_{s-1}) [rows, factors].
    """
    observed = head.log_probs(
        hidden, tokens[..., None], unembedding, bias, context, chunk
    ).squeeze(-1)
    weights = head.log_weights(hidden, context)
    chain = conditional_log_probs(weights, observed[..., None], observed)
    return (weights + observed.sum(dim=1)).logsumexp(dim=-1), chain.squeeze(-1)


def cp_head(
    size: int,
    vocab: int,
    seed: int = 0,
    unembedding: torch.Tensor | None = None,
    **form: Any,
) -> CPHead:
    """An untrained CP head of a form, for a target of some sizes."""
    if unembedding is None:
        unembedding = torch.zeros(vocab, size)
    target = TargetLayers(
        model_type="llama",
        hidden_size=size,
        vocab_size=vocab,
        num_hidden_layers=3,
    )
    config = CPConfig(
        verifier="m", target=target, num_speculative_tokens=1, **form
    )
    return CPHead(config, initial_tensors(config, unembedding, seed))


@torch.no_grad()
def draft(
    head: CPHead,
    hidden: torch.Tensor,  # [rows, d]
    first: torch.Tensor,  # [rows] int64, sampled by the target
    unembedding: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    sampling: Sampling | None = None,
    embeddings: torch.Tensor | None = None,  # [V, d], which a condition reads
) -> torch.Tensor:
    """Drafts of positions 2 to n [rows, n - 1]."""
    context = None if embeddings is None else embeddings[first][:, None]
    weights = head.log_weights(hidden, context)
    if not head.lead:
        logits = head.logits(
            hidden,
            unembedding,
            bias,
            context,
        )
        return chosen(draft_chain, logits)(
            weights,
            logits,
            first,
            sampling,
        )[0]
    assert unembedding is not None and embeddings is not None
    recurrence = head.recurrence()
    state = recurrence.start(hidden)

    def read(position: int, before: torch.Tensor | None) -> torch.Tensor:
        nonlocal state
        state = recurrence.advance(
            state, embeddings[first if before is None else before]
        )
        return functional.linear(recurrence.experts(state), unembedding, bias)

    return draft_in_sequence(
        weights,
        head.factors,
        read,
        sampling,
    )


def sampling_at(
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> Sampling:
    """Rows at temperatures, with limits if they are given, and seeds from torch's generator."""
    if top_k is None:
        top_k = torch.full_like(temperature, UNLIMITED)
    if top_p is None:
        top_p = torch.ones_like(temperature)
    positions = torch.zeros_like(temperature, dtype=torch.int64)
    seeds = torch.randint_like(positions, 1 << 62)
    return Sampling(temperature, top_k, top_p, seeds, positions)


def corpus(seed: int = 0) -> list[np.ndarray]:
    """Token ids of documents of up to 30 tokens, some of them in hardly any."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 7, rng.integers(0, 30)) ** 2 % 7 for _ in range(12)]


def counted(
    documents: list[np.ndarray],
    order: int,
    vocab: int = 7,
    max_entries: int = 1 << 20,
) -> CoOccurrence:
    """The n-grams of documents."""
    unigram = np.bincount(np.concatenate(documents), minlength=vocab)
    return CoOccurrence.from_tokens(documents, unigram, order, max_entries)
