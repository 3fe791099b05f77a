# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd plan`, declared once."""

from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from vllm_ppd.heads.comma_lists import COMMAS, Integers


class PlanOptions(BaseModel):
    """The heads, the load and the machine to plan for."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    heads: tuple[str, ...] = Field(min_length=1, description="heads folders with a calibration, to be compared")
    batch: int | None = Field(None, ge=1, description="requests decoded together (default 1)")
    rate: float | None = Field(None, gt=0, description="requests a second, instead of a batch size")
    new_tokens: int = Field(256, ge=1, description="tokens that a request generates, for --rate")
    texts: Literal["sampled", "greedy"] = Field(
        "sampled", description="texts on which acceptance was measured; match rates of candidates are of greedy ones"
    )
    stages: Literal["1", "2"] = Field("1", description="pipeline stages; 2 plans PPD's worker group (early heads)")
    candidates: Integers = Field((1, 3, 5), description="k of the worker group, of those that were calibrated")
    hardware: Annotated[tuple[float, ...] | None, COMMAS] = Field(
        None,
        description="GB/s of memory, TFLOP/s and link latency in microseconds, as 4800,990,10: a machine by its "
        "roofline (default: the calibration's own times)",
    )
    timings: str | None = Field(
        None,
        description="results of `ppd bench decode` on this machine: its steps without drafting say what a layer takes; "
        "or the step costs that a server measured when it started, in the file that its log names: steps with drafts "
        "and without as they are, host time included (default: the calibration's own times)",
    )
    model: str | None = Field(
        None, validation_alias=AliasChoices("model", "target"), description="target (none: the one that the heads name)"
    )
    top: int = Field(8, ge=1, description="settings shown")
    largest: int = Field(512, ge=1, description="largest batch size considered")

    @field_validator("hardware", mode="after")
    @classmethod
    def _sound(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and len(value) != 3:
            raise ValueError("give GB/s, TFLOP/s and microseconds, as 4800,990,10")
        if value is not None and (value[0] <= 0 or value[1] <= 0 or value[2] < 0):
            raise ValueError("bandwidth and TFLOP/s must be above 0, link latency at least 0")
        return value

    @field_validator("timings")
    @classmethod
    def _single_machine(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("hardware") is not None:
            raise ValueError("a roofline says the machine, too; give one of --hardware and --timings")
        return value

    @field_validator("rate")
    @classmethod
    def _single_load(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("batch") is not None:
            raise ValueError("a batch size says the load, too; give one of them")
        return value
