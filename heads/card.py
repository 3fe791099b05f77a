# SPDX-License-Identifier: Apache-2.0
"""The model card of a heads folder, README.md: what the Hub shows of them, from the files beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.hub import hub_name
from vllm_ppd.heads.in_words import in_words, table
from vllm_ppd.heads.training.provenance import Provenance, provenance_of

NAME = "README.md"
BEGIN = "<!-- vllm-ppd: `ppd calibrate` writes what follows anew, up to the end mark -->"
END = "<!-- vllm-ppd: end -->"
OTHER = "other"  # the Hub's name of a licence that it does not know


def write_card(folder: str | os.PathLike[str], config: HeadsConfig, calibration: str | None = None) -> None:
    """Write the model card, or the part between its marks anew: what a user wrote around them stays.

    A card without the marks is a user's own and stays as it is.

    Args:
        folder: of the heads, and of how they were trained where that is known.
        config: of the heads.
        calibration: the report of a finished calibration.

    Raises:
        OSError: if the card cannot be written.
    """
    path = Path(folder) / NAME
    try:
        facts = provenance_of(folder)
    except HeadsError:
        facts = None
    body = "\n\n".join([BEGIN, *_blocks(config, facts, calibration), END])
    if not path.exists():
        write_text(path, f"{_front_matter(config, facts)}\n{body}\n")
        return
    before, begin, rest = path.read_text(encoding="utf-8", errors="replace").partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        write_text(path, before + body + after)


def _front_matter(config: HeadsConfig, facts: Provenance | None) -> str:
    """What the Hub indexes: YAML, in which JSON's strings and lists are as good."""
    license = facts.options.get("license", OTHER) if facts is not None else OTHER
    fields = {"license": license, "library_name": "vllm", "pipeline_tag": "text-generation"}
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    if hub_name(config.verifier) is not None:
        lines.append(f"base_model: {json.dumps(config.verifier)}")
    lines.append(f"tags: {json.dumps(['speculative-decoding', 'vllm-ppd', 'speculators', config.kind])}")
    return "\n".join(["---", *lines, "---"])


def _blocks(config: HeadsConfig, facts: Provenance | None, calibration: str | None) -> Iterator[str]:
    target = shown_target(config)
    yield f"# {config.kind} heads for {target}"
    yield (
        "Small heads with which [vLLM](https://github.com/vllm-project/vllm) drafts tokens of the target model, "
        "through the plugin `vllm-ppd`. The target verifies every draft, so its output distribution stays as it is."
    )
    rows = [
        ["target", f"{target} ({config.target.model_type}, {config.target.num_hidden_layers} layers, hidden size "
                   f"{config.target.hidden_size}, vocabulary {config.target.vocab_size})"],
        ["heads", f"{config.kind}: {config.describe()}, {config.dtype}"],
        ["recommended drafts per step", str(config.num_speculative_tokens)],
    ]  # fmt: skip
    yield table(["what", "is"], rows)
    yield "## Serving"
    yield f"    vllm serve {target} --speculative-model HEADS          # this repository, or a folder with its files"
    yield "## Training"
    yield from _training(facts)
    yield "## Calibration"
    yield calibration or "Not calibrated (`ppd calibrate`)."


def _training(facts: Provenance | None) -> Iterator[str]:
    if facts is None:
        yield "Not known."
        return
    shown = {
        "time": facts.time, "tokens": facts.tokens, "steps": facts.steps, "documents": facts.documents_in_data,
        "seconds": facts.seconds,
        **{name: facts.options.get(name) for name in ("learning_rate", "batch_size", "sequence_length", "seed")},
    }  # fmt: skip
    yield table(["", "value"], [[name, str(value)] for name, value in shown.items() if value is not None])
    if facts.held_out_after:
        rows = [
            [name, in_words(facts.held_out_before.get(name)), in_words(after)]
            for name, after in facts.held_out_after.items()
        ]
        yield table(["held out", "before", "after"], rows)


def shown_target(config: HeadsConfig) -> str:
    """The target without the folders of the disk that it lay on."""
    return Path(config.verifier).name if os.path.isabs(config.verifier) else config.verifier
