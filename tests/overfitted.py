# SPDX-License-Identifier: Apache-2.0
"""Heads for a tiny random model, fitted to what the model itself says, so that its
drafts are accepted at times.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.folder import load_tensors, save_heads
from vllm_ppd.heads.kinds import KINDS, recipe_of
from vllm_ppd.heads.module import most_frequent
from vllm_ppd.heads.target import fingerprint
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch


def packed(sequences: list[list[int]]) -> Batch:
    """Sequences as the documents of one window."""
    ids = [token for tokens in sequences for token in tokens]
    places = [torch.arange(len(tokens)) for tokens in sequences]
    return Batch(torch.tensor([ids]), torch.cat(places)[None])


def moved(folder: str, target: Path, out: Path) -> Path:
    """Write heads anew for a target that says about what theirs says; returns their folder."""
    config, tensors = load_tensors(folder)
    changes = {"verifier": str(target), "fingerprint": fingerprint(target)}
    save_heads(out, config.model_copy(update=changes), tensors)
    return out


def untrained(model: Path, kind: str, **options: Any) -> Any:
    """The recipe of a kind over a model in float32."""
    given = {"model": str(model), "data": ("-",), "out": "-", **options}
    target = Target(
        str(model),
        torch.device("cpu"),
        torch.float32,
        trainable=options.get("recipe") == "full",
    )
    return recipe_of(kind)(KINDS[kind].options(**given), target)


def fit(
    model: Path,
    kind: str,
    sequences: list[list[int]],
    out: Path,
    steps: int = 60,
    **options: Any,
) -> Path:
    """Train heads of a kind on token sequences and write their folder."""
    torch.manual_seed(0)
    if kind == "dynamo":
        # A random model's own distribution is nearly flat
        options = {"distillation": 0.0, **options}
    recipe = untrained(model, kind, out=str(out), save_dtype="float32", **options)
    flat = packed(sequences).input_ids.flatten()
    vocab_size = recipe.target.vocab_size
    recipe.token_counts = torch.bincount(flat, minlength=vocab_size).int()
    if short := recipe.options.train_vocab_size:
        recipe.use_vocabulary(most_frequent(recipe.token_counts, short))
    recipe.start_from(iter([packed(sequences)]))
    groups = [
        {"params": group["params"], "lr": group["peak"]}
        for group in recipe.groups(3e-3)
    ]
    optimizer = torch.optim.AdamW(groups)
    parts = [packed(sequences[first::4]) for first in range(4)]
    states = {
        id(part): recipe.states(part) for part in parts
    }  # of a frozen target
    recipe.states = lambda batch: states[id(batch)]  # type: ignore[method-assign]
    for step in range(steps):
        loss, _ = recipe.loss(parts[step % 4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if kind == "dynamo" and recipe.options.mask_entries:
        recipe.cooccurrence = CoOccurrence.from_tokens(
            [np.array(tokens) for tokens in sequences],
            recipe.token_counts.numpy(),
            recipe.options.tokens,
            1 << 20,
        )
    save_heads(
        out,
        recipe.config(),
        recipe.tensors(),
    )
    return out
