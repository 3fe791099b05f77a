# SPDX-License-Identifier: Apache-2.0
"""`ppd inspect HEADS` describes heads and their target, and says whether they will load."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

NOT_COMPARED = "not known: the folder is valid, but was not compared with its target"


class InspectOptions(BaseModel):
    """The heads to describe, and the target to check them against."""

    heads: str = Field(
        description="heads folder, or ORGANIZATION/NAME[@REVISION] on the Hub"
    )
    target: str | None = Field(
        None,
        validation_alias=AliasChoices("target", "model"),
        description="target to check against (default: the one that the heads name)",
    )


def run(options: InspectOptions) -> int:
    """Describe heads, then check them as the server would; exit code 2 if it would refuse them."""
    from vllm_ppd.heads.errors import HeadsError
    from vllm_ppd.heads.io import CALIBRATION_NAME, described, load_calibration
    from vllm_ppd.heads.target import check_on_disk, find_target
    from vllm_ppd.heads.text import in_words
    from vllm_ppd.heads.training.provenance import NAME as PROVENANCE
    from vllm_ppd.heads.training.provenance import provenance_of

    named = options.target
    if (
        named is not None
        and Path(named).is_dir()
        and not Path(named, "config.json").is_file()
    ):
        raise HeadsError(
            f"--target {named}: the folder has no config.json; give the folder of a "
            "model"
        )
    folder, config, is_whole = described(options.heads, PROVENANCE, CALIBRATION_NAME)
    target = named or find_target(config.verifier, folder)
    stored = config.to_json()
    shapes = config.shapes().values()
    lines: dict[str, Any] = {"kind": config.kind, "target": config.verifier}
    lines |= {
        f"target {name}": value for name, value in config.target.model_dump().items()
    }
    shown = type(config).model_fields.keys() - {
        "fingerprint",
        "target",
        "layer_tensors",
    }
    lines |= {name: value for name, value in stored.items() if name in shown}
    lines["num_speculative_tokens"] = config.num_speculative_tokens
    lines["weights"] = (
        f"{sum(map(math.prod, shapes)):,} numbers in {len(shapes)} tensors"
    )
    if not is_whole:
        lines["weights"] += ", not fetched"

    def trained() -> str:
        facts = provenance_of(folder)
        return f"{facts.time} ({facts.command})"

    lines["trained"] = _if_there(trained)
    lines["calibrated"] = _if_there(lambda: load_calibration(folder) and "yes")
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {in_words(value)}")
    try:
        weights = check_on_disk(config, folder, target)
    except HeadsError:
        print("will load: no")
        raise
    if weights is not None:
        verdict = f"yes, with {target}" + (f" ({weights})" if weights else "")
    elif target:
        verdict = (
            f"{NOT_COMPARED} {target!r}, which is not on this disk (give --target DIR)"
        )
    else:
        verdict = f"{NOT_COMPARED}, which it does not name (give --target DIR)"
    if not is_whole:
        verdict += "; weights are checked after they are fetched (`hf download`)"
    print(f"will load: {verdict}")
    return 0


def _if_there(read: Callable[[], Any]) -> str:
    """A value from an optional file of heads, or why there is none, which does not keep
    heads from loading.
    """
    from vllm_ppd.heads.errors import HeadsError, MissingFile

    try:
        return str(read())
    except MissingFile:
        return "no"
    except HeadsError as error:
        return str(error)
