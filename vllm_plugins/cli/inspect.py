# SPDX-License-Identifier: Apache-2.0
"""`ppd inspect HEADS` describes heads and their target, and says whether they will load."""

import math
from collections.abc import Callable
from pathlib import Path

from pydantic import AliasChoices, BaseModel, Field


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
    from vllm_ppd.heads.folder import (
        CONFIG_NAME,
        check_folder,
        load_calibration,
        load_config,
    )
    from vllm_ppd.heads.hub import whole_folder
    from vllm_ppd.heads.provenance import provenance_of
    from vllm_ppd.heads.target import check_on_disk, find_target
    from vllm_ppd.heads.text import in_words

    given = options.target
    if given and Path(given).is_dir() and not Path(given, CONFIG_NAME).is_file():
        raise HeadsError(
            f"--target {given}: the folder has no {CONFIG_NAME}; give the folder of a "
            "model"
        )
    folder = whole_folder(options.heads, ["*.json"])
    config = load_config(folder)
    is_fetched = folder == options.heads or any(
        Path(folder).glob("*.safetensors")
    )
    if is_fetched:
        check_folder(folder)
    shapes = config.shapes().values()
    weights = f"{sum(map(math.prod, shapes)):,} numbers in {len(shapes)} tensors"
    lines = {"kind": config.kind}
    lines |= config.model_dump(
        mode="json", exclude={"fingerprint", "layer_tensors"}
    )
    lines["weights"] = weights if is_fetched else f"{weights}, not fetched"
    lines["trained"] = _if_there(
        lambda: "{0.time} ({0.command})".format(provenance_of(folder))
    )
    lines["calibrated"] = _if_there(lambda: load_calibration(folder) and "yes")
    width = max(map(len, lines))
    for field, value in lines.items():
        print(f"{field:<{width}}  {in_words(value)}")
    target = given or find_target(config.verifier, folder)
    try:
        other_weights = check_on_disk(config, folder, target)
    except HeadsError:
        print("will load: no")
        raise
    if other_weights is None:
        reason = f" {target!r}, which is not on this disk"
        verdict = (
            "not known: the folder is valid, but was not compared with its target"
            f"{reason if target else ', which it does not name'} (give --target DIR)"
        )
    else:
        reason = f" ({other_weights})" if other_weights else ""
        verdict = f"yes, with {target}{reason}"
    if not is_fetched:
        verdict += "; weights are checked after they are fetched (`hf download`)"
    print(f"will load: {verdict}")
    return 0


def _if_there(read: Callable[[], object]) -> str:
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
