# SPDX-License-Identifier: Apache-2.0
"""Settings of DynaMo's joint, declared once: stored with the heads, read by calibration and by the server."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator


class JointSettings(BaseModel):
    """Settings of the joint; defaults are the paper's (appendix A.1) where it names one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    # The joint of 4 tokens has k^3 entries a request: 2 million at 128.
    k: int = Field(50, ge=1, le=128, description="top-k of each head")
    alpha_c: float = Field(1.0, ge=0, le=1, description="power of the co-occurrence mask (eq. 6); 0 leaves it out")
    eps_b: float = Field(0.5, ge=0, le=1, description="back-off threshold: 0 always takes n tokens, 1 always one")
    blur: int = Field(3, ge=1, le=31, description="kernel of the Gaussian blur before Otsu's threshold; 1 is none")
    adaptive: bool = Field(True, description="Otsu's threshold on top of the static one")
    repetition_penalty: float = Field(
        1.0, ge=1, le=100, description="divides n-grams that repeat a token (the paper: 1.1, and 100 in its Fig. 11)"
    )

    @field_validator("blur")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("must be odd")
        return value
