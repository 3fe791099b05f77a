# SPDX-License-Identifier: Apache-2.0
"""The model card of a heads folder (README.md), which the Hub shows, made from the
files beside it.
"""

import os
from pathlib import Path

from huggingface_hub import ModelCardData

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.hub import hub_name
from vllm_ppd.heads.training.provenance import Provenance, provenance_of

NAME = "README.md"
BEGIN = "<!-- vllm-ppd: `ppd calibrate` writes what follows anew, up to the end mark -->"
END = "<!-- vllm-ppd: end -->"


def write_card(
    folder: str | os.PathLike[str],
    config: HeadsConfig,
    calibration: str | None = None,
) -> None:
    """Write the model card, or rewrite the part between its marks; what a user wrote
    around them stays.

    A card without the marks is the user's and is left alone.

    Args:
        folder: with the heads and, if they were trained here, their provenance.
        config: of the heads.
        calibration: the report of a finished calibration.
    """
    path = Path(folder) / NAME
    try:
        facts = provenance_of(folder)
    except HeadsError:  # the heads were not trained here
        facts = Provenance(command="", time="not known")
    if path.exists():
        card = path.read_text(encoding="utf-8")
    else:
        data = ModelCardData(
            license=facts.options.get("license", "other"),
            library_name="vllm",
            pipeline_tag="text-generation",
            base_model=config.verifier if hub_name(config.verifier) else None,
            tags=["speculative-decoding", "vllm-ppd", "speculators", config.kind],
        )
        card = f"---\n{data.to_yaml()}\n---\n{BEGIN}{END}\n"
    before, begin, rest = card.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        body = _body(config, facts, calibration)
        write_text(path, f"{before}{BEGIN}\n\n{body}\n\n{END}{after}")


def _body(config: HeadsConfig, facts: Provenance, calibration: str | None) -> str:
    name = shown_target(config)
    target = config.target
    served = name if hub_name(config.verifier) else "TARGET"
    held_out = "".join(
        f"\n- held out, {key}: {facts.held_out_before.get(key)} before, {value} after"
        for key, value in facts.held_out_after.items()
    )
    return f"""\
# {config.kind} heads for {name}

Small heads with which [vLLM](https://github.com/vllm-project/vllm) drafts tokens of the target
model, through the plugin `vllm-ppd`. The target verifies every draft, so the output keeps its
distribution, up to rounding.

- target: {name} ({target.model_type}, {target.num_hidden_layers} layers, \
hidden size {target.hidden_size}, vocabulary {target.vocab_size})
- heads: {config.kind}: {config.describe()}, {config.dtype}
- recommended drafts per step: {config.num_speculative_tokens}
- trained: {facts.time}, {facts.steps} steps, {facts.tokens} tokens{held_out}

    vllm serve {served} --speculative-model HEADS    # this repository, or a folder with its files

## Calibration

{calibration or "Not calibrated (`ppd calibrate`)."}"""


def shown_target(config: HeadsConfig) -> str:
    """The name of the target without the folders of the disk that it was on."""
    name = config.verifier
    return os.path.basename(name) if os.path.isabs(name) else name
