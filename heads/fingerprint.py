# SPDX-License-Identifier: Apache-2.0
"""Short hashes of what heads depend on in their target: its tokenizer and its LM head."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from vllm_ppd.heads.layout import TargetFingerprint
from vllm_ppd.heads.raw_tensors import raw_tensors, rounded

# Heads read through the LM head; when it is tied, the checkpoint stores the embedding only.
LM_HEAD_NAMES = (
    "lm_head.weight",
    "embed_out.weight",
    "model.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
)
SAMPLED_ROWS = 64


DTYPES = ("F32", "BF16", "F16")  # as safetensors names them; float32 holds their values exactly


def fingerprint(model_folder: str | Path) -> TargetFingerprint:
    """Hash the tokenizer file, its vocabulary, and rows of the LM head of a model folder on this disk.

    The LM head's hashes cover its shape, dtype, first and last 64 rows: enough to tell two models apart, and read
    in milliseconds from files of any size. A folder without the files gives None for that hash.
    """
    folder = Path(model_folder)
    tokenizer = folder / "tokenizer.json"
    content = tokenizer.read_bytes() if tokenizer.is_file() else None
    return TargetFingerprint(
        tokenizer=None if content is None else hashlib.sha256(content).hexdigest(),
        vocabulary=None if content is None else _vocabulary_hash(content),
        **_lm_head_hashes(folder),
    )


def _vocabulary_hash(tokenizer: bytes) -> str | None:
    """Of a tokenizer.json; None for one that is written in another way."""
    try:
        content = json.loads(tokenizer)
        known, added = content["model"]["vocab"], content.get("added_tokens") or []
        pairs = list(known.items()) if isinstance(known, dict) else [(word, i) for i, (word, *_) in enumerate(known)]
        pairs += [(token["content"], token["id"]) for token in added]
        text = json.dumps(sorted({(int(number), str(word)) for word, number in pairs}))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def tensor_files(model_folder: Path) -> dict[str, str]:
    """The file of each tensor of a checkpoint in safetensors, by name; none where there is no such checkpoint."""
    index, whole = model_folder / "model.safetensors.index.json", model_folder / "model.safetensors"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    if not whole.is_file():
        return {}
    with safe_open(whole, framework="np") as file:
        return dict.fromkeys(file.keys(), whole.name)


def _lm_head_hashes(folder: Path) -> dict[str, Any]:
    files = tensor_files(folder)
    name = next((name for name in LM_HEAD_NAMES if name in files), None)
    if name is None or not (folder / files[name]).is_file():
        return {}
    with safe_open(folder / files[name], framework="np") as file:
        rows = file.get_slice(name)
        shape, dtype = rows.get_shape(), rows.get_dtype()
    if dtype in DTYPES:
        stored = raw_tensors(folder / files[name], [name])[name]
        both_ends = np.concatenate([stored.bits[:SAMPLED_ROWS], stored.bits[max(0, shape[0] - SAMPLED_ROWS) :]])
        sampled = stored._replace(bits=both_ends).float32()
    else:
        sampled = _other_rows(folder / files[name], name)

    def digest(of: str, values: np.ndarray) -> str:
        return hashlib.sha256(f"{shape} {of}".encode() + values.tobytes()).hexdigest()

    copies = {dtype: rounded(sampled, dtype) for dtype in DTYPES}
    return {
        "lm_head": digest(dtype, sampled),
        "lm_head_bfloat16": digest("BF16", copies["BF16"]),
        "same_values": frozenset(digest(dtype, sampled) for dtype in DTYPES),
        "rounded": frozenset(digest(dtype, copies[dtype]) for dtype in DTYPES if dtype != "F32"),
    }


def _other_rows(path: Path, name: str) -> np.ndarray:
    """The sampled rows of a tensor whose dtype numpy may lack."""
    import torch

    with safe_open(path, framework="pt") as file:
        rows = file.get_slice(name)
        last = rows[max(0, rows.get_shape()[0] - SAMPLED_ROWS) :]
        return torch.cat([rows[:SAMPLED_ROWS], last]).float().numpy()
