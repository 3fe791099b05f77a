# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd bench curves`, declared once."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CurvesOptions(BaseModel):
    """Which runs to draw."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    heads: tuple[str, ...] = Field(min_length=1, description="heads folders of one kind, drawn together")
    out: str = Field("curves.svg", description="the SVG to write")
