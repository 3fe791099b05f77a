# SPDX-License-Identifier: Apache-2.0
"""The plan: every setting of the given heads under a load, the best one, and from which batch size on to stop."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.calibration.recommend import Setting, settings
from vllm_ppd.heads.calibration.stored import NAME as CALIBRATION
from vllm_ppd.heads.calibration.stored import calibration_of
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.dynamo.config import DynaMoConfig
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.io import HeadsError, described
from vllm_ppd.heads.planning.fleet import MOST_REPLICAS, Fleet, Load, fleet
from vllm_ppd.heads.planning.machine import machine_of, weights_of
from vllm_ppd.heads.planning.options import PlanOptions
from vllm_ppd.heads.planning.predict import Way, drafting, group
from vllm_ppd.heads.quote import quoted
from vllm_ppd.heads.target_path import find_target

SHOWN = (1, 2, 4, 8, 16, 32)  # batch sizes of the table


class Predicted(NamedTuple):
    """A way of decoding under the load."""

    way: Way
    batch: int  # requests that decode together
    speedup: float  # of a request's tokens, in units of vLLM's own under the same load


class Plan(NamedTuple):
    """What was planned."""

    target: str
    ways: list[Predicted]  # best first
    stop_at: int | None  # from its batch on, the largest size at which the best way gains (None: all considered)
    lacks: dict[str, str]  # heads without such a way, and why

    @property
    def best(self) -> Predicted | None:
        """The best way, or None if none of them gains."""
        return self.ways[0] if self.ways and self.ways[0].speedup > 1 else None


def all_ways(options: PlanOptions) -> tuple[str, list[Way]]:
    """The target, and every setting that was calibrated.

    Raises:
        HeadsError: on heads without a finished calibration, of different targets, or of a kind without a group.
    """
    ways: list[Way] = []
    targets, lacking = [], []
    for name in options.heads:
        folder, config, _ = described(name, CALIBRATION)
        result = calibration_of(folder)
        targets.append(options.model or find_target(config.verifier, folder))
        if targets[-1] != targets[0]:
            raise HeadsError(
                f"{quoted(name)} has heads for {quoted(targets[-1])}, the others for {quoted(targets[0])}; plan one "
                "target, or name it with --target"
            )
        parts = result["parts"]
        if _has_transforms(config) and "transform_in_layers" not in parts["timing"]:  # not always counted
            try:
                size = config.target.hidden_size**2 / weights_of(targets[0]).layer[0]
                parts = parts | {"timing": parts["timing"] | {"transform_in_layers": size}}
            except HeadsError:
                lacking.append(name)
        ways += _ways(name, config, parts, targets[0], options)
    if not ways:
        raise HeadsError(f"no setting of {', '.join(options.heads)} can be planned for; see --stages and --candidates")
    for folder in lacking:
        print(
            f"{folder}: its calibration lacks what the heads' own transforms cost, so gains look too high; run "
            f"`ppd calibrate {folder}` again, or give --model DIR",
            file=sys.stderr,
        )
    return targets[0], ways


def make_plan(options: PlanOptions) -> Plan:
    """Predict every setting under the load.

    Raises:
        HeadsError: as all_ways, or if the load is more than a replica decodes.
    """
    target, ways = all_ways(options)
    predicted = [found for way in ways if (found := _under_load(way, options)) is not None]
    if not predicted:
        raise HeadsError(
            f"{options.rate:g} requests a second of {options.new_tokens} tokens are more than one replica decodes in "
            f"batches of up to {options.largest}; give a lower --rate"
        )
    predicted.sort(key=lambda found: -found.speedup)
    behind = dict.fromkeys(
        without_ways(options, [found.way for found in predicted]),
        f"no batch of up to {options.largest} keeps up with --rate",
    )
    best = predicted[0]
    losing = (size for size in range(best.batch, options.largest + 1) if best.way.speedup(size) <= 1)
    first = next(losing, None)
    return Plan(target, predicted, None if first is None else first - 1, behind | without_ways(options, ways))


def make_fleets(options: PlanOptions) -> tuple[str, list[Fleet]]:
    """The target, and the replicas that keep the latency target: first vLLM alone, then the best ways of all heads.

    Raises:
        HeadsError: as all_ways.
    """
    assert options.rate is not None and options.latency is not None
    target, ways = all_ways(options)
    load = Load(options.rate, options.new_tokens, options.seed)
    of_heads = [[way for way in ways if heads_of(way) == name] for name in options.heads]
    best = {
        id(way): way
        for some in (ways, *filter(None, of_heads)) for size in SHOWN
        for way in [max(some, key=lambda way: way.speedup(size))]
    }  # fmt: skip
    found = [fleet(way, options.largest, load, options.latency, True) for way in best.values()]
    found.sort(key=lambda one: (one.replicas or MOST_REPLICAS + 1, one.latency))
    return target, [fleet(ways[0], options.largest, load, options.latency, False), *found]


def heads_of(way: Way) -> str:
    """The heads that a way of decoding reads, as they were asked about."""
    return str(way.options.get("model", "none"))


def without_ways(options: PlanOptions, ways: Sequence[Way]) -> dict[str, str]:
    """The heads that were asked about and none of the ways reads, and why."""
    found = {heads_of(way) for way in ways}
    return dict.fromkeys(
        (name for name in options.heads if name not in found), "no setting for these --stages and --candidates"
    )


def _has_transforms(config: HeadsConfig) -> bool:
    """Whether the heads have d x d matrices of their own, which drafting reads."""
    return config.factorised if isinstance(config, CPConfig) else getattr(config, "head", None) == "transform"


def _ways(folder: str, config: HeadsConfig, parts: dict[str, Any], target: str, options: PlanOptions) -> Iterator[Way]:
    depth = config.target.num_hidden_layers
    machine = machine_of(options, parts["timing"], target, depth)
    if options.stages == "2":
        if not isinstance(config, EarlyConfig):
            raise HeadsError(f"{quoted(folder)} has {config.kind} heads; a worker group drafts with early heads")
        yield from _groups(folder, parts["matches"], depth, machine, options)
        return
    for setting in settings(config, parts, greedy=options.texts == "greedy"):
        if isinstance(config, DynaMoConfig) and setting.options["sampling"]["alpha_c"] != config.sampling.alpha_c:
            continue  # a server takes the power of the mask from the heads
        served = _served(setting, folder if setting.trained else None)
        yield drafting(setting, config.method, served, machine, depth)


def _groups(folder: str, matches: dict[str, Any], depth: int, machine: Any, options: PlanOptions) -> Iterator[Way]:
    for candidates in options.candidates:
        for form, rates in matches["match"].get(str(candidates), {}).items():
            for layer, rate in zip(matches["layers"], rates, strict=True):
                if (depth + 1) // 2 <= layer < depth:
                    model = {"model": folder} if form == "Y" else {}
                    served = {**model, "exit_layer": layer, "candidates": candidates}
                    yield group(rate, layer, candidates, served, machine, depth, options.new_tokens)


def _served(setting: Setting, folder: str | None) -> dict[str, Any]:
    """A setting in the words of a server's options."""
    own = setting.options
    found: dict[str, Any] = {
        "model": folder,
        "exit_layer": setting.exit_layer,
        "num_speculative_tokens": setting.drafts,
    }
    if "sampling" in own:
        found["eps_b"] = own["sampling"]["eps_b"]
    found["draft_vocab_size"] = own.get("draft_vocab_size")
    return {name: value for name, value in found.items() if value is not None}


def _under_load(way: Way, options: PlanOptions) -> Predicted | None:
    """At the batch size, or at the smallest that keeps up with the rate (None: no batch does)."""
    if options.rate is None:
        batch = options.batch or 1
        return Predicted(way, batch, way.speedup(batch))
    wanted, sizes = options.rate * options.new_tokens, range(1, options.largest + 1)
    ours = next((size for size in sizes if way.tokens_a_second(size) >= wanted), None)
    if ours is None:
        return None
    # Where vLLM alone does not keep up, it is compared at the same batch size.
    alone = next((size for size in sizes if size / way.plain(size) >= wanted), ours)
    return Predicted(way, ours, way.plain(alone) * way.length / way.seconds(ours))
