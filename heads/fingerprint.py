# SPDX-License-Identifier: Apache-2.0
"""Short hashes of what heads depend on in their target: its tokenizer and its LM head."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel
from safetensors import safe_open

# Heads read through the LM head; when it is tied, the checkpoint stores the embedding only.
LM_HEAD_NAMES = (
    "lm_head.weight",
    "embed_out.weight",
    "model.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
)
SAMPLED_ROWS = 64


class TargetFingerprint(BaseModel):
    """Hashes in hexadecimal; None where the target is not at hand."""

    tokenizer: str | None = None
    lm_head: str | None = None


def fingerprint(model_folder: str | Path) -> TargetFingerprint:
    """Hash the tokenizer file and rows of the LM head of a model folder on this disk.

    The LM head's hash covers its shape, dtype, first and last 64 rows: enough to tell two models apart, and read
    in milliseconds from files of any size. A folder without the files gives None for that hash.
    """
    folder = Path(model_folder)
    tokenizer = folder / "tokenizer.json"
    return TargetFingerprint(
        tokenizer=hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else None,
        lm_head=_lm_head_hash(folder),
    )


def _lm_head_hash(folder: Path) -> str | None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text())["weight_map"]
    elif (folder / "model.safetensors").is_file():
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            files = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        return None
    name = next((name for name in LM_HEAD_NAMES if name in files), None)
    if name is None or not (folder / files[name]).is_file():
        return None
    with safe_open(folder / files[name], framework="pt") as file:
        rows = file.get_slice(name)
        shape = rows.get_shape()
        digest = hashlib.sha256(f"{shape} {rows.get_dtype()}".encode())
        for part in (rows[:SAMPLED_ROWS], rows[max(0, shape[0] - SAMPLED_ROWS) :]):
            # bfloat16 has no numpy type: hash its exact float32 value.
            digest.update(part.float().numpy().tobytes())
    return digest.hexdigest()
