# SPDX-License-Identifier: Apache-2.0
"""Heads for a tiny random model, fitted to what the model itself says, so that its
drafts are accepted at times.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.io import load_tensors, save_heads
from vllm_ppd.heads.kinds import KINDS, recipe_of
from vllm_ppd.heads.target import fingerprint
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch


def windows(sequences: list[list[int]]) -> Batch:
    """Sequences as documents packed into windows; padding is documents of one token,
    which nothing is learnt from.
    """
    width = max(map(len, sequences))
    rows: list[list[list[int]]] = []
    for tokens in sorted(sequences, key=len, reverse=True):
        row = next(
            (row for row in rows if sum(map(len, row)) + len(tokens) <= width), None
        )
        if row is None:
            rows.append(row := [])
        row.append(tokens)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    places = torch.zeros(len(rows), width).long()
    for index, row in enumerate(rows):
        flat = [token for tokens in row for token in tokens]
        ids[index, : len(flat)] = torch.tensor(flat)
        places[index, : len(flat)] = torch.cat(
            [torch.arange(len(tokens)) for tokens in row]
        )
    return Batch(ids, places)


def moved(folder: str, target: Path, out: Path) -> Path:
    """Write heads anew for a target that says about what theirs says; returns their folder."""
    config, tensors = load_tensors(folder)
    save_heads(
        out,
        config.model_copy(
            update={"verifier": str(target), "fingerprint": fingerprint(target)}
        ),
        tensors,
    )
    return out


def fit(
    model: Path,
    kind: str,
    sequences: list[list[int]],
    out: Path,
    steps: int = 120,
    **options: Any,
) -> Path:
    """Train heads of a kind on token sequences and write their folder."""
    torch.manual_seed(0)
    target = Target(str(model), torch.device("cpu"), torch.float32)
    given = {
        "model": str(model),
        "data": ("-",),
        "out": str(out),
        "stored_dtype": "float32",
        **options,
    }
    if kind == "dynamo":
        # A random model's own distribution is nearly flat
        given.setdefault("distillation", 0.0)
    recipe = recipe_of(kind)(KINDS[kind].options(**given), target)
    if kind in ("cp", "recurrent"):
        recipe.start_from(iter([windows(sequences)]))
    groups = [
        {"params": group["params"], "lr": group["peak"]}
        for group in recipe.groups(3e-3)
    ]
    optimiser = torch.optim.AdamW(groups if kind in ("cp", "recurrent") else groups[:1])
    parts = [windows(sequences[first::4]) for first in range(4)]
    states = {id(part): recipe.states(part) for part in parts}  # of a frozen target
    recipe.states = lambda batch: states[id(batch)]  # type: ignore[method-assign]
    for step in range(steps):
        loss, _ = recipe.loss(parts[step % 4])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    if kind in ("cp", "recurrent"):
        flat = torch.tensor([token for tokens in sequences for token in tokens])
        recipe.token_counts = torch.bincount(flat, minlength=target.vocab_size).int()
    if kind == "dynamo" and recipe.options.mask_entries:
        chunks = [np.array(tokens) for tokens in sequences]
        recipe.cooccurrence = CoOccurrence.from_tokens(
            chunks, target.vocab_size, recipe.options.tokens
        )
    save_heads(out, recipe.config(), recipe.tensors())
    return out
