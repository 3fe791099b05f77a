# SPDX-License-Identifier: Apache-2.0
"""`ppd inspect HEADS` describes heads and their target, and says whether they will load."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

UNKNOWN = "not recorded"
NOT_COMPARED = "not known: the folder is valid, but was not compared with its target"
UNREAD = "; weights are checked after they are fetched (`hf download`)"


class InspectOptions(BaseModel):
    """The heads to describe, and the target to check them against."""

    heads: str = Field(description="heads folder, or ORGANISATION/NAME[@REVISION] on the Hub")
    target: str | None = Field(
        None,
        validation_alias=AliasChoices("target", "model"),
        description="target to check against (default: the one that the heads name)",
    )


def run(options: InspectOptions) -> int:
    """Describe heads, then check them as the server would; exit code 2 if it would refuse them."""
    from vllm_ppd.heads.errors import HeadsError
    from vllm_ppd.heads.in_words import in_words, setting_in_words
    from vllm_ppd.heads.io import CALIBRATION_NAME, described
    from vllm_ppd.heads.target import find_target
    from vllm_ppd.heads.training.provenance import NAME as PROVENANCE
    from vllm_ppd.heads.weight_files import file_names

    named = options.target
    if named is not None and Path(named).is_dir() and not Path(named, "config.json").is_file():
        raise HeadsError(f"--target {named}: the folder has no config.json; give the folder of a model")
    folder, config, whole = described(options.heads, PROVENANCE, CALIBRATION_NAME)
    target = options.target or find_target(config.verifier, folder)
    stored = config.to_json()
    lines: dict[str, Any] = {"kind": f"{config.kind} ({in_words(stored['architectures'])})"}
    lines["target"] = config.verifier or UNKNOWN
    if options.target is None and target != config.verifier:
        lines["target found at"] = target
    lines |= {f"target {name}": in_words(value or UNKNOWN) for name, value in config.target.model_dump().items()}
    shown = type(config).model_fields.keys() - {"fingerprint", "target", "layer_tensors"}
    lines |= {name: setting_in_words(name, value) for name, value in stored.items() if name in shown}
    lines["num_speculative_tokens"] = config.num_speculative_tokens
    shapes = config.shapes().values()
    size = sum(Path(folder, name).stat().st_size for name in file_names(folder)) if whole else 0
    lines["weights"] = f"{sum(map(math.prod, shapes)):,} numbers in {len(shapes)} tensors" + (
        f", {size / 1e6:.2f} MB" if whole else ", not fetched"
    )
    lines |= _if_there("trained", _provenance, folder) | _if_there("calibrated", _calibration, folder)
    print_aligned(lines)
    try:
        print(f"will load: {_check(config, folder, target, options.target is not None)}{'' if whole else UNREAD}")
    except HeadsError:
        print("will load: no")
        raise
    return 0


def _check(config: Any, folder: str, target: str, named: bool) -> str:
    """The server's checks against a target on this disk; named: whether --target names it."""
    from vllm_ppd.heads.target import check_on_disk

    weights = check_on_disk(config, folder, target)
    if weights is not None:
        return f"yes, with {target}" + (f" ({weights})" if weights else "")
    if not target:
        return f"{NOT_COMPARED}, which it does not name (give --target DIR)"
    instead = "" if named else " (give --target DIR)"
    return f"{NOT_COMPARED} {target!r}, which is not on this disk{instead}"


def _if_there(name: str, read: Callable[[str], str], folder: str) -> dict[str, str]:
    """A line from an optional file of heads; if it is damaged, the reason, which does not keep heads from loading."""
    from vllm_ppd.heads.errors import HeadsError, MissingFile

    try:
        return {name: read(folder)}
    except MissingFile:
        return {}
    except HeadsError as error:
        return {name: str(error)}


def _provenance(folder: str) -> str:
    from vllm_ppd.heads.training.provenance import provenance_of

    facts = provenance_of(folder)
    known = facts.tokens is not None and facts.seconds is not None
    return f"{facts.time}{f', {facts.tokens:,} tokens in {facts.seconds:.0f} s' if known else ''} ({facts.command})"


def _calibration(folder: str) -> str:
    """A line on whether `ppd plan` can use the calibration."""
    from vllm_ppd.heads.io import load_calibration

    load_calibration(folder)
    return "yes"


def print_aligned(lines: dict[str, str]) -> None:
    """Print names and values in two columns."""
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")
