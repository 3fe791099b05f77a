# SPDX-License-Identifier: Apache-2.0
"""The weights of a heads folder: `model.safetensors`, or the shards of an index, and
files beside them.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.files import named, read_json_object
from vllm_ppd.heads.text import LONGEST_VALUE, quoted, shortened

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Holds the counts of heads whose published weights are not changed
COUNTS_NAME = "token_counts.safetensors"


def opened_files(
    folder: str | os.PathLike[str], beside: Sequence[str] = ()
) -> Iterator[Any]:
    """Open each file of a folder's weights: the shards if there is an index and no
    whole file.

    Args:
        folder: of the heads.
        beside: optional files beside the weights.

    Raises:
        MissingFile: if a file is missing; pickles are never loaded.
        HeadsError: if a file is damaged.
    """
    names = [WEIGHTS_NAME]
    index = Path(folder, INDEX_NAME)
    if index.exists() and not Path(folder, WEIGHTS_NAME).exists():
        places = read_json_object(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise HeadsError(
                f"{named(index)} has no weight_map; copy or write the heads again"
            )
        names = sorted(set(map(str, places.values())))
    names += [name for name in beside if Path(folder, name).exists()]
    for name in names:
        path = Path(folder, name)
        if not path.is_file():
            raise MissingFile(
                f"heads folder {quoted(str(folder))} has no {name}; save the heads as "
                "safetensors"
            )
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            reason = shortened(str(error), LONGEST_VALUE)
            raise HeadsError(
                f"{named(path)} is not whole safetensors ({reason}); copy or write "
                "the heads again"
            ) from None
