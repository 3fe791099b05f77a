# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd plan`, declared once."""

from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from vllm_ppd.heads.comma_lists import COMMAS, Integers


class PlanOptions(BaseModel):
    """The heads, the load and the machine to plan for."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    heads: tuple[str, ...] = Field(min_length=1, description="calibrated heads folders to compare")
    batch: int | None = Field(None, ge=1, description="requests decoded together (default 1)")
    rate: float | None = Field(None, gt=0, description="requests per second, instead of a batch size")
    new_tokens: int = Field(256, ge=1, description="tokens that a request generates, for --rate")
    texts: Literal["sampled", "greedy"] = Field(
        "sampled", description="texts on which acceptance was measured; match rates of candidates are of greedy texts"
    )
    stages: Literal["1", "2"] = Field("1", description="pipeline stages; 2 plans PPD's worker group (early heads only)")
    candidates: Integers = Field((1, 3, 5), description="values of k for the worker group, among the calibrated ones")
    hardware: Annotated[tuple[float, ...] | None, COMMAS] = Field(
        None,
        description="GB/s of memory, TFLOP/s and link latency in microseconds of a machine to plan for, by its "
        "roofline, such as 4800,990,10 (default: the calibration's times)",
    )
    timings: str | None = Field(
        None,
        description="results of `ppd bench decode` on this machine, whose steps without drafts give a layer's time; "
        "or the file of step costs named in a server's log, which has measured times of steps with and without drafts, "
        "host time included (default: the calibration's times)",
    )
    model: str | None = Field(
        None, validation_alias=AliasChoices("model", "target"), description="target (default: that of the heads)"
    )
    top: int = Field(8, ge=1, description="settings to show")
    largest: int = Field(512, ge=1, description="largest batch size to consider")

    @field_validator("hardware", mode="after")
    @classmethod
    def _sound(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and len(value) != 3:
            raise ValueError("give GB/s, TFLOP/s and microseconds, such as 4800,990,10")
        if value is not None and (value[0] <= 0 or value[1] <= 0 or value[2] < 0):
            raise ValueError("bandwidth and TFLOP/s must be above 0, link latency at least 0")
        return value

    @field_validator("timings")
    @classmethod
    def _single_machine(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("hardware") is not None:
            raise ValueError("--hardware already describes the machine; give only one of them")
        return value

    @field_validator("rate")
    @classmethod
    def _single_load(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("batch") is not None:
            raise ValueError("--batch already describes the load; give only one of them")
        return value
