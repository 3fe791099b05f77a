# SPDX-License-Identifier: Apache-2.0
"""Options that are lists: `a,b` on the command line, a tuple in Python."""

from typing import Annotated, Any

from pydantic import BeforeValidator


def _split(value: Any) -> Any:
    return tuple(item for item in value.replace(" ", "").split(",") if item) if isinstance(value, str) else value


COMMAS = BeforeValidator(_split)
Integers = Annotated[tuple[int, ...], COMMAS]
Numbers = Annotated[tuple[float, ...], COMMAS]
