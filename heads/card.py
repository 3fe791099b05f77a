# SPDX-License-Identifier: Apache-2.0
"""The model card of a heads folder (README.md), which the Hub shows, made from the files beside it."""

import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import ModelCardData

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.hub import hub_name
from vllm_ppd.heads.in_words import in_words, table
from vllm_ppd.heads.training.provenance import Provenance, provenance_of

NAME = "README.md"
BEGIN = "<!-- vllm-ppd: `ppd calibrate` writes what follows anew, up to the end mark -->"
END = "<!-- vllm-ppd: end -->"
SETTINGS = ("learning_rate", "batch_size", "sequence_length", "seed")  # training options to show
OTHER = "other"  # the Hub's value for a licence that it does not list


def write_card(folder: str | os.PathLike[str], config: HeadsConfig, calibration: str | None = None) -> None:
    """Write the model card, or rewrite the part between its marks; what a user wrote around them stays.

    A card without the marks is the user's and is left alone.

    Args:
        folder: with the heads and, if they were trained here, their provenance.
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
        data = ModelCardData(
            license=OTHER if facts is None else facts.options.get("license", OTHER),
            library_name="vllm",
            pipeline_tag="text-generation",
            base_model=config.verifier if hub_name(config.verifier) else None,
            tags=["speculative-decoding", "vllm-ppd", "speculators", config.kind],
        )
        write_text(path, f"---\n{data.to_yaml()}\n---\n{body}\n")
        return
    before, begin, rest = path.read_text(encoding="utf-8", errors="replace").partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        write_text(path, before + body + after)


def _blocks(config: HeadsConfig, facts: Provenance | None, calibration: str | None) -> Iterator[str]:
    name, target = shown_target(config), config.target
    yield f"# {config.kind} heads for {name}"
    yield (
        "Small heads with which [vLLM](https://github.com/vllm-project/vllm) drafts tokens of the target model, "
        "through the plugin `vllm-ppd`. The target verifies every draft, so the output keeps its distribution, up to "
        "rounding."
    )
    sizes = f"hidden size {target.hidden_size}, vocabulary {target.vocab_size}"
    yield table(["property", "value"], [
        ["target", f"{name} ({target.model_type}, {target.num_hidden_layers} layers, {sizes})"],
        ["heads", f"{config.kind}: {config.describe()}, {config.dtype}"],
        ["recommended drafts per step", config.num_speculative_tokens],
    ])  # fmt: skip
    yield "## Serving"
    served = name if hub_name(config.verifier) else "TARGET"
    yield f"    vllm serve {served} --speculative-model HEADS          # this repository, or a folder with its files"
    if served != name:
        yield f"TARGET is the folder that was `{name}` in training; these heads name no model on the Hub."
    yield "## Training"
    if facts is None:
        yield "Not known."
    else:
        shown = {name: getattr(facts, name) for name in ("time", "tokens", "steps", "documents_in_data", "seconds")}
        shown |= {name: facts.options.get(name) for name in SETTINGS}
        yield table(["", "value"], [[name, value] for name, value in shown.items() if value is not None])
        before = facts.held_out_before
        rows = [[key, in_words(before.get(key)), in_words(after)] for key, after in facts.held_out_after.items()]
        if rows:
            yield table(["held out", "before", "after"], rows)
    yield "## Calibration"
    yield calibration or "Not calibrated (`ppd calibrate`)."


def shown_target(config: HeadsConfig) -> str:
    """The name of the target without the folders of the disk that it was on."""
    return Path(config.verifier).name if os.path.isabs(config.verifier) else config.verifier
