# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401 (the imports register the kinds)
"""The kinds of heads: each has a folder, whose config registers itself when it is
imported here.

KINDS lists them. `recipe.py` and `calibration.py` are beside a kind's `config.py`; they
load torch, so they are imported only when needed.
"""

from importlib import import_module
from typing import Any

from vllm_ppd.heads.base import KINDS
from vllm_ppd.heads.cp import config as cp
from vllm_ppd.heads.dynamo import config as dynamo
from vllm_ppd.heads.early import config as early
from vllm_ppd.heads.recurrent import config as recurrent


def kind_in(data: dict[str, Any]) -> str | None:
    """The kind of heads that a config.json describes; None if it is none of ours."""
    return next(
        (kind for kind, config in KINDS.items() if config.is_named_in(data)), None
    )


def recipe_of(kind: str) -> Any:
    """The recipe class that trains heads of a kind: RECIPE in `recipe.py`."""
    return _beside(kind, "recipe").RECIPE


def calibration_of(kind: str) -> Any:
    """The module `calibration.py` of a kind, with PARTS (measurements of `ppd
    calibrate` by name) and `tables`.
    """
    return _beside(kind, "calibration")


def _beside(kind: str, module: str) -> Any:
    return import_module(f"{KINDS[kind].__module__.rpartition('.')[0]}.{module}")
