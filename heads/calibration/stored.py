# SPDX-License-Identifier: Apache-2.0
"""`calibration.json` of a heads folder: what of it is read again, and what it must look like."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.files import named, read_json_object
from vllm_ppd.heads.io import first_problem, load_config
from vllm_ppd.heads.quote import quoted

NAME = "calibration.json"
LONGEST = 16 << 20  # bytes

Amount = Annotated[float, Field(ge=0, le=1e15)]
Share = Annotated[float, Field(ge=0, le=1)]
Size = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")]  # a number, as JSON has it for a key
Power = Annotated[str, Field(pattern=r"^(0|1|0\.[0-9]{1,6})$")]  # from 0 to 1
Texts = Annotated[str, Field(max_length=80)]


class _Stored(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Counts(_Stored):
    cycles: Amount
    drafted: Amount
    length: float = Field(ge=1, le=17)


class _Row(_Stored):
    cycles: Amount
    drafted: Amount
    accepted: Amount
    drafts_allowed: int = Field(ge=1, le=16)
    eps_b: Share
    alpha_c: Share | None = None


class _ByDrafts(_Stored):
    by_drafts: list[_Counts] = Field(min_length=1, max_length=16)


class _Rows(_Stored):
    rows: list[_Row] = Field(min_length=1, max_length=4096)


Seconds = Annotated[dict[Size, Annotated[float, Field(ge=1e-12, le=1e6)]], Field(min_length=1, max_length=256)]


class _TimedParts(_Stored):
    layer: Seconds
    lm_head: Seconds


class _Timing(_Stored):
    seconds: _TimedParts
    lm_head_share: Share
    transform_in_layers: Amount = 0.0


class _Parts(_Stored):
    timing: _Timing

    def exits(self) -> list[int]:
        """Layers that are named."""
        return []


def _on_two_texts(by_texts: dict[str, Any]) -> None:
    if len(by_texts) != 2 or "greedy" not in by_texts:
        raise ValueError("acceptance must be of greedy texts and of sampled ones")


class _Matches(_Stored):
    layers: list[Annotated[int, Field(ge=1, le=4096)]] = Field(min_length=1)
    match: dict[Size, dict[str, list[Share]]]
    acceptance: dict[Texts, dict[str, dict[Size, list[_Counts]]]]

    @model_validator(mode="after")
    def _sound(self) -> _Matches:
        _on_two_texts(self.acceptance)
        if any(len(rates) != len(self.layers) for forms in self.match.values() for rates in forms.values()):
            raise ValueError("match must have a rate for each of its layers")
        return self


class _EarlyParts(_Parts):
    matches: _Matches

    def exits(self) -> list[int]:
        named = [layer for forms in self.matches.acceptance.values() for by in forms.values() for layer in by]
        return [*self.matches.layers, *map(int, named)]


class _CPParts(_Parts):
    acceptance: dict[Texts, _ByDrafts]
    vocabulary: dict[Size, _ByDrafts] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sound(self) -> _CPParts:
        _on_two_texts(self.acceptance)
        return self


class _DynaMoParts(_Parts):
    acceptance: dict[Texts, _Rows]
    vocabulary: dict[Size, _Rows] = Field(default_factory=dict)
    mask: dict[Power, _Rows] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sound(self) -> _DynaMoParts:
        _on_two_texts(self.acceptance)
        return self


_PARTS: dict[str, type[_Parts]] = {"early": _EarlyParts, "cp": _CPParts, "dynamo": _DynaMoParts}


def calibration_of(folder: str) -> dict[str, Any]:
    """The finished calibration of a heads folder.

    Raises:
        HeadsError: if there is none, or if what is read of it is of another shape.
    """
    path, again = Path(folder) / NAME, f"run `ppd calibrate {quoted(folder)} --data FILE`"
    try:
        result = read_json_object(path, LONGEST, f"{again} again")
    except MissingFile:
        result = {}
    if result.get("finished") is not True:
        raise HeadsError(f"heads in {quoted(folder)} have no finished calibration; {again}")
    config = load_config(folder)
    try:
        parts = _PARTS[config.kind].model_validate(result.get("parts"))
    except ValidationError as error:
        raise HeadsError(f"{named(path)}: parts.{first_problem(error)}; {again} again") from None
    deepest = max(parts.exits(), default=1)
    if deepest >= config.target.num_hidden_layers:
        raise HeadsError(f"{named(path)}: parts.matches names exit layer {deepest}, which is none; {again} again")
    return result


def digest(part: dict[str, Any]) -> str:
    """What tells whether a finished part is as it was written."""
    return hashlib.sha256(json.dumps(part).encode()).hexdigest()


def continued(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """The unfinished result of the same options and heads, or the fresh one; only parts that are as they were written.

    Raises:
        HeadsError: if the file is no regular one.
    """
    try:
        found = read_json_object(path, LONGEST, "it is measured again")
    except MissingFile:
        return fresh
    except HeadsError as error:
        if not path.is_file():
            raise
        print(error)
        return fresh
    options = found.get("options")
    # An option that the file lacks has been added since, and so has the part that it is of.
    alike = isinstance(options, dict) and fresh["options"] | options == fresh["options"]
    if found.get("finished") or not alike or found.get("heads_stamp") != fresh["heads_stamp"]:
        return fresh
    parts, digests = found.get("parts"), found.get("digests")
    if isinstance(parts, dict) and isinstance(digests, dict):
        fresh["parts"] = {name: part for name, part in parts.items() if digests.get(name) == digest(part)}
        fresh["digests"] = {name: digests[name] for name in fresh["parts"]}
    return fresh
