# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd fit`, declared once."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class FitOptions(BaseModel):
    """Write data, then train and calibrate heads, within a time limit. The same command resumes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        description=(
            "target: a causal LM folder or Hub name that vLLM and transformers can load"
        )
    )
    out: str = Field(
        description=(
            "heads folder to write; OUT.fit keeps the data and a stopped run's progress"
        )
    )
    minutes: float = Field(
        60.0,
        gt=0,
        description="time limit; half of it is for the data, and most of the rest "
        "for training",
    )
    prompts: tuple[str, ...] = Field(
        (),
        description="files of prompts like those to be served (default: 300 of the "
        "package, and the model's own)",
    )
    seed: int = Field(0, description="seed of the texts and of the training")
    trust_remote_code: bool = Field(
        False, description="run code that comes with the model"
    )
    license: str = Field(
        "other",
        pattern=r"^[a-z0-9.-]+$",
        max_length=64,
        description="license of the heads for their model card, as the Hub names it",
    )

    def essence(self) -> dict[str, Any]:
        """The options that must be the same for a stopped run to continue."""
        return self.model_dump(
            mode="json", exclude={"out", "trust_remote_code", "license"}
        )
