# SPDX-License-Identifier: Apache-2.0
"""The stored parts of a calibration, typed by each kind of heads, and the drafting
settings made from them.

Reading needs no torch. Reports and plans read these parts; figures that only reports
show are stored untyped.
"""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Amount = Annotated[float, Field(ge=0, le=1e15)]
Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[int, Field(ge=1, le=10**9, strict=False)]  # JSON's keys are strings
Seconds = Annotated[
    dict[Number, Annotated[float, Field(ge=1e-12, le=1e6)]],
    Field(min_length=1, max_length=256),
]
T = TypeVar("T")


class Stored(BaseModel):
    """A part of a calibration, or a piece of one; keys of later versions are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Timed(Stored):
    """Median seconds by batch size."""

    layer: Seconds
    lm_head: Seconds


class Timing(Stored):
    """What gives the cost of drafts relative to a pass of the target."""

    seconds: Timed | None = None  # measured by earlier calibrations
    lm_head_share: Share  # h: a read of the LM head relative to a full pass, batch 1
    # A d x d matrix relative to a decoder layer; missing in early calibrations
    transform_in_layers: Amount = 0.0


class Counts(Stored):
    """Expected counts of an engine on some texts, in vLLM's terms."""

    cycles: Amount
    drafts: Amount = 0.0
    drafted: Amount
    accepted: Amount = 0.0
    rate: Share = 0.0  # accepted / drafted
    length: float = Field(1.0, ge=1, le=17)  # 1 + accepted / drafts


class ByDrafts(Stored):
    """Counts with 1, 2, ... drafts per step."""

    by_drafts: list[Counts] = Field(min_length=1, max_length=16)
    repeated_4_grams: Share = 0.0
    covers: Share = 1.0  # share of the training text that the draft vocabulary covers
    # Drafts accepted per step at each position
    by_category: dict[str, list[Share]] = Field(default_factory=dict)


def _on_two_texts(by_texts: dict[str, T]) -> dict[str, T]:
    if len(by_texts) != 2 or "greedy" not in by_texts:
        raise ValueError("acceptance must have greedy and sampled texts")
    return by_texts


ByTexts = Annotated[
    dict[Annotated[str, Field(max_length=80)], T], AfterValidator(_on_two_texts)
]


def on_texts(by_texts: Mapping[str, T], greedy: bool) -> T:
    """The part measured on greedy texts, or on the sampled ones."""
    (name,) = (name for name in by_texts if (name == "greedy") == greedy)
    return by_texts[name]


class Parts(Stored):
    """The parts of a calibration; each kind adds its own. They are validated with
    `num_layers` of the target.
    """

    timing: Timing


class Work(NamedTuple):
    """What the drafts of a step read, in addition to a full pass of the target."""

    layers: float = 0.0  # decoder layers
    matrices: float = 0.0  # d x d matrices of the heads
    reads: float = 0.0  # reads of the whole LM head
    rows: int = 1  # hidden states of a request in each such read


class Setting(NamedTuple):
    """A calibrated setting of drafting with heads, its cost, and its accepted drafts."""

    options: dict[str, Any]  # fields of the heads' configuration
    drafts: int  # most drafts per cycle, n
    drafted: float  # drafts per cycle, on average
    length: float  # tokens per cycle
    # Decoder layers that drafting adds to a pass, the heads' own d x d transforms among
    # them
    layers: float
    reads: float  # reads of the whole LM head that it adds
    rows: int = 1  # hidden states of a request in each such read
    exit_layer: int | None = None  # layer at which early drafts are read
    trained: bool = True  # whether heads draft
    served: dict[str, Any] | None = (
        # The server's options for this setting (None: only the heads can specify it)
        None
    )

    def cycle(self, num_layers: int, head_share: float) -> float:
        """Work of a cycle in full passes at batch 1, where memory bandwidth is the
        limit; h is the LM head's share.
        """
        return 1 + self.layers * (1 - head_share) / num_layers + head_share * self.reads
