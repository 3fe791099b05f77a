# SPDX-License-Identifier: Apache-2.0
"""The weights of a heads folder: `model.safetensors`, or the shards of an index, and
files beside them.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.files import named, read_json_object
from vllm_ppd.heads.text import LONGEST_VALUE, quoted, shortened

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Holds the counts of heads whose published weights are not changed
COUNTS_NAME = "token_counts.safetensors"
LONGEST_INDEX = 16 << 20  # bytes


class Stored(NamedTuple):
    """A tensor as the header of its file describes it."""

    path: Path
    shape: list[int]
    dtype: str  # as safetensors names it


def file_names(folder: str | os.PathLike[str]) -> list[str]:
    """The names of the weights' files in a folder: the shards if there is an index and
    no whole file.

    Raises:
        HeadsError: if the index is damaged.
    """
    index = Path(folder, INDEX_NAME)
    if Path(folder, WEIGHTS_NAME).exists() or not index.exists():
        return [WEIGHTS_NAME]
    places = read_json_object(index, LONGEST_INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise HeadsError(
            f"{named(index)} has no weight_map; copy or write the heads again"
        )
    return sorted(set(map(str, places.values())))


def stored_tensors(
    folder: str | os.PathLike[str], beside: Sequence[str] = ()
) -> dict[str, Stored]:
    """Every tensor in the files of a folder's weights, by its name in the file.

    Args:
        folder: of the heads.
        beside: optional files beside the weights.

    Raises:
        MissingFile: if a file is missing; pickles are never loaded.
        HeadsError: if a file is damaged.
    """
    there = [name for name in beside if Path(folder, name).exists()]
    tensors: dict[str, Stored] = {}
    for name in [*file_names(folder), *there]:
        path = Path(folder, name)
        if not path.is_file():
            raise MissingFile(
                f"heads folder {quoted(str(folder))} has no {name}; save the heads as "
                "safetensors"
            )
        with damage_in_a_line(path), safe_open(path, framework="np") as file:
            for tensor in file.keys():  # noqa: SIM118 (no mapping)
                rows = file.get_slice(tensor)
                tensors[tensor] = Stored(path, rows.get_shape(), rows.get_dtype())
    return tensors


@contextmanager
def damage_in_a_line(path: Path) -> Iterator[None]:
    """Turn errors about damaged files into a HeadsError."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        problem = f"is not whole safetensors ({shortened(str(error), LONGEST_VALUE)})"
        raise HeadsError(
            f"{named(path)} {problem}; copy or write the heads again"
        ) from None
