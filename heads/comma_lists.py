# SPDX-License-Identifier: Apache-2.0
"""Options that are lists: `a,b` on the command line, a tuple in Python."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def _split(value: Any) -> Any:
    return (
        tuple(item for item in value.replace(" ", "").split(",") if item)
        if isinstance(value, str)
        else value
    )


COMMAS = BeforeValidator(_split)
Integers = Annotated[tuple[int, ...], COMMAS]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), COMMAS]
Shares = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=1), COMMAS
]
