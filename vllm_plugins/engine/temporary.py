# SPDX-License-Identifier: Apache-2.0
"""Attributes of vLLM's modules and objects that are ours for a moment."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a module or an object within a context."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
