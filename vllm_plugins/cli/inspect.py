# SPDX-License-Identifier: Apache-2.0
"""`ppd inspect HEADS`: what heads these are, for which target, and whether they will load."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

UNREAD = "; the numbers of the weights are read when they are fetched (`hf download`)"


class InspectOptions(BaseModel):
    """What is described, and what it is checked against."""

    heads: str = Field(description="heads folder, or ORGANISATION/NAME[@REVISION] on the Hub")
    target: str | None = Field(
        None,
        validation_alias=AliasChoices("target", "model"),
        description="target to check against (none: the one that the heads name)",
    )


def run(options: InspectOptions) -> int:
    """Describe, then check as the server would; exit code 2 if it would refuse."""
    from vllm_ppd.heads.calibration.stored import NAME as CALIBRATION
    from vllm_ppd.heads.in_words import in_words, setting_in_words
    from vllm_ppd.heads.io import WEIGHTS_NAME, HeadsError, described
    from vllm_ppd.heads.target_path import find_target
    from vllm_ppd.heads.training.provenance import NAME as PROVENANCE

    folder, config, whole = described(options.heads, PROVENANCE, CALIBRATION)
    target = options.target or find_target(config.verifier, folder)
    lines: dict[str, Any] = {"kind": f"{config.kind} ({config.architecture})", "target": config.verifier}
    if options.target is None and target != config.verifier:
        lines["target found at"] = target
    lines |= {f"target {name}": in_words(value) for name, value in config.target.model_dump().items()}
    lines |= {
        name: setting_in_words(name, value)
        for name, value in config.to_json().items()
        if name in type(config).model_fields and name not in ("fingerprint", "target", "layer_tensors")
    }
    lines["num_speculative_tokens"] = config.num_speculative_tokens
    shapes = config.shapes().values()
    lines["weights"] = f"{sum(map(math.prod, shapes)):,} numbers in {len(shapes)} tensors" + (
        f", {(Path(folder) / WEIGHTS_NAME).stat().st_size / 1e6:.2f} MB" if whole else ", not fetched"
    )
    lines |= _provenance(folder) | _calibration(folder)
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")
    try:
        print(f"will load: {_check(config, folder, target)}{'' if whole else UNREAD}")
    except HeadsError as error:
        print("will load: no")
        raise error
    return 0


def _check(config: Any, folder: str, target: str) -> str:
    """The server's own checks against a target that is on this disk."""
    from vllm_ppd.heads.target_check import check_on_disk

    if check_on_disk(config, folder, target):
        return f"yes, with {target}"
    return f"the folder is sound; target {target!r} is not on this disk, so it was not compared (give --target DIR)"


def _provenance(folder: str) -> dict[str, str]:
    """How they were trained; of a damaged file what is wrong with it, which keeps no heads from loading."""
    from vllm_ppd.heads.errors import HeadsError, MissingFile
    from vllm_ppd.heads.training.provenance import provenance_of

    try:
        facts = provenance_of(folder)
    except MissingFile:
        return {}
    except HeadsError as error:
        return {"trained": str(error)}
    spent = (
        "" if facts.tokens is None or facts.seconds is None else f", {facts.tokens:,} tokens in {facts.seconds:.0f} s"
    )
    return {"trained": f"{facts.time}{spent} ({facts.command})"}


def _calibration(folder: str) -> dict[str, str]:
    """Whether `ppd plan` can use their calibration."""
    from vllm_ppd.heads.calibration.stored import NAME, calibration_of
    from vllm_ppd.heads.errors import HeadsError

    if not (Path(folder) / NAME).exists():
        return {}
    try:
        calibration_of(folder)
    except HeadsError as error:
        return {"calibrated": str(error)}
    return {"calibrated": "yes"}
