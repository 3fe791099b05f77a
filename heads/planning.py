# SPDX-License-Identifier: Apache-2.0
"""The stored parts of a calibration, typed by each kind of heads, the drafting settings
made from them, and advice: the best setting, its gain, and PPD's Theorem 4.1.

Reading needs no torch. Figures that only reports show are stored untyped.
"""

import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Amount = Annotated[float, Field(ge=0, le=1e15)]
Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[
    int, Field(ge=1, le=10**9, strict=False)
]  # JSON's keys are strings
T = TypeVar("T")


class Stored(BaseModel):
    """A part of a calibration, or a piece of one; keys of later versions are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Timing(Stored):
    """What gives the cost of drafts relative to a pass of the target."""

    lm_head_share: (
        Share  # h: a read of the LM head relative to a full pass, batch 1
    )
    # A d x d matrix relative to a decoder layer; missing in early calibrations
    transform_in_layers: Amount = 0.0


class Counts(Stored):
    """Expected counts of an engine on some texts, in vLLM's terms; they add up over
    texts.
    """

    cycles: Amount  # forward passes after the prompt
    drafts: Amount = 0.0  # passes with drafts to verify
    drafted: Amount  # drafted tokens
    accepted: Amount = 0.0  # accepted tokens
    rate: Share = 0.0  # accepted / drafted
    length: float = Field(1.0, ge=1, le=17)  # 1 + accepted / drafts


class ByDrafts(Stored):
    """Counts with 1, 2, ... drafts per step."""

    by_drafts: list[Counts] = Field(min_length=1, max_length=16)


def _on_two_texts(by_texts: dict[str, T]) -> dict[str, T]:
    if len(by_texts) != 2 or "greedy" not in by_texts:
        raise ValueError("acceptance must have greedy and sampled texts")
    return by_texts


ByTexts = Annotated[
    dict[Annotated[str, Field(max_length=80)], T], AfterValidator(_on_two_texts)
]


def sampled(by_texts: Mapping[str, T]) -> T:
    """The part measured on sampled texts."""
    (name,) = by_texts.keys() - {"greedy"}
    return by_texts[name]


class Parts(Stored):
    """The parts of a calibration; each kind adds its own."""

    timing: Timing


class PartsByVocabulary(Parts, Generic[T]):
    """The parts of heads that draft from a vocabulary."""

    acceptance: ByTexts[T]  # with the whole vocabulary
    # On sampled texts, by the size of the draft vocabulary
    vocabulary: dict[Number, T] = Field(default_factory=dict)

    def by_vocabulary(self) -> Iterator[tuple[int | None, T]]:
        """What was measured on sampled texts, by size (None: the whole vocabulary)."""
        yield None, sampled(self.acceptance)
        yield from self.vocabulary.items()

    def by_name(self) -> dict[str, T]:
        """What was measured, by a name for reports."""
        by_name = dict(self.acceptance)
        for size, by in self.vocabulary.items():
            by_name[f"sampled, from {size} tokens"] = by
        return by_name


class Setting(NamedTuple):
    """A calibrated setting of drafting with heads, its cost, and its accepted drafts."""

    options: dict[str, Any]  # fields of the heads' configuration
    length: float  # tokens per cycle
    # Decoder layers that drafting adds to a pass, the heads' own d x d matrices among
    # them
    layers: float
    reads: float  # reads of the whole LM head that it adds


def recommend(config: Any, parts: Parts) -> dict[str, Any]:
    """The setting of trained heads with the highest predicted speedup on sampled
    texts.

    The speedup is the tokens of a step over its cost, in passes of the target at batch
    1, where memory bandwidth is the limit. The cost counts the weights that are read,
    of which the LM head's share is h, and leaves out the host's work.

    Returns:
        The fields of the heads' configuration, and `acceptance_length`,
        `cycle_in_passes` and `predicted_speedup`. Only the last one, 0, if nothing was
        measured.
    """
    best: dict[str, Any] = {"predicted_speedup": 0.0}
    num_layers = config.target.num_hidden_layers
    share = parts.timing.lm_head_share  # h
    for setting in config.settings(parts):
        passes = 1 + setting.layers * (1 - share) / num_layers
        passes += setting.reads * share
        speedup = round(setting.length / passes, 4)
        if speedup > best["predicted_speedup"]:
            best = dict(setting.options)
            best["acceptance_length"] = setting.length
            best["cycle_in_passes"] = round(passes, 4)
            best["predicted_speedup"] = speedup
    return best


def advice(heads: str, target: str, chosen: dict[str, Any]) -> str:
    """What to do with heads, by what `recommend` has chosen for them."""
    speedup = chosen["predicted_speedup"]
    if speedup <= 1:
        return (
            f"Predicted gain on this text: none ({speedup:.2f} of vLLM's tokens per "
            "second). Train the heads on more and more varied text, or serve without "
            "them."
        )
    command = shlex.join(["vllm", "serve", target, "--speculative-model", heads])
    return (
        f"Predicted speedup at batch 1: {speedup:.2f}, from "
        f"{chosen['acceptance_length']:.3f} tokens in a step of "
        f"{chosen['cycle_in_passes']:.3f} passes. The prediction counts the weights that "
        "are read, not the work of the host. Measure with `ppd bench decode`.\n\n"
        f"    {command}"
    )


class Group(NamedTuple):
    """Expected costs of PPD's worker group a token, in layers of one token."""

    latency: float  # layers one after the other
    compute: float  # layers in all


def theorem_4_1(
    num_layers: int, split: int, candidates: int, match_rate: float, tokens: int
) -> Group:
    """PPD, Theorem 4.1, divided by the number of tokens.

    latency = d - (d - d_bar) (l - 1) p_correct / l
    compute = latency + k (d - d_bar)

    Args:
        num_layers: d.
        split: d_bar, the layer at which candidates are read, d / 2 at least.
        candidates: k.
        match_rate: p_correct, the share of tokens that are among the k candidates.
        tokens: l, of a text; nothing starts its first token early.
    """
    late = num_layers - split
    latency = num_layers - late * match_rate * (tokens - 1) / tokens
    return Group(latency, latency + candidates * late)
