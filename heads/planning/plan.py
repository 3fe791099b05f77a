# SPDX-License-Identifier: Apache-2.0
"""A plan: every setting of some heads under a load, the best one, and the batch size from which to stop drafting."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.io import CALIBRATION_NAME, described, load_calibration
from vllm_ppd.heads.measured import Parts
from vllm_ppd.heads.planning.machine import machine_of
from vllm_ppd.heads.planning.options import PlanOptions
from vllm_ppd.heads.planning.predict import Decoding, Group, drafting_settings
from vllm_ppd.heads.planning.timings import ServedSteps
from vllm_ppd.heads.quote import quoted
from vllm_ppd.heads.target import find_target

SHOWN = (1, 2, 4, 8, 16, 32)  # batch sizes of the table


class Predicted(NamedTuple):
    """A setting under the load."""

    decoding: Decoding
    batch: int  # requests that decode together
    speedup: float  # of a request, relative to vLLM alone under the same load


class Plan(NamedTuple):
    """Predictions for heads under a load."""

    target: str
    predicted: list[Predicted]  # best first
    stop_at: int | None  # largest batch size up to which the best setting gains (None: all considered sizes)
    lacks: dict[str, str]  # reasons for heads that have no such setting or no measured steps

    @property
    def best(self) -> Predicted | None:
        """The best setting, or None if none of them gains."""
        return self.predicted[0] if self.predicted and self.predicted[0].speedup > 1 else None

    @property
    def served(self) -> ServedSteps | None:
        """The measured steps on which the plan is based."""
        return self.predicted[0].decoding.machine.served


def all_settings(options: PlanOptions) -> tuple[str, list[Decoding]]:
    """The target, and all calibrated settings.

    Raises:
        HeadsError: on heads without a finished calibration, of different targets, or of a kind without a group.
    """
    target, settings = "", list[Decoding]()
    for name in options.heads:
        folder, config, _ = described(name, CALIBRATION_NAME)
        parts = load_calibration(folder)
        verifier = options.model or find_target(config.verifier, folder)
        if target not in ("", verifier):
            raise HeadsError(
                f"{quoted(name)} has heads for {quoted(verifier)}, but others are for {quoted(target)}; plan for one "
                "target, or name it with --target"
            )
        target = verifier
        settings += _settings(name, config, parts, target, options)
    if not settings:
        raise HeadsError(f"{', '.join(options.heads)} have no setting to plan for; change --stages or --candidates")
    return target, settings


def make_plan(options: PlanOptions) -> Plan:
    """Predict every setting under the load.

    Raises:
        HeadsError: as all_settings, if a server measured steps of none of them, or if the load is more than a replica
            sustains.
    """
    target, settings = all_settings(options)
    unmeasured: dict[str, dict[str, None]] = {}
    for setting in settings:
        if setting.unmeasured:
            unmeasured.setdefault(heads_of(setting), {})[setting.unmeasured] = None
    measured = [setting for setting in settings if not setting.unmeasured]
    if not measured:
        raise HeadsError(
            f"{quoted(options.timings)} has no steps of these settings: {next(iter(settings)).unmeasured}; start a "
            "server with one of them once, and give the file that its log names"
        )
    predicted = [under for setting in measured if (under := _under_load(setting, options)) is not None]
    if not predicted:
        raise HeadsError(
            f"a replica cannot sustain {options.rate:g} requests per second of {options.new_tokens} tokens in batches "
            f"of up to {options.largest}; lower --rate, or raise --largest"
        )
    predicted.sort(key=lambda under: -under.speedup)
    lacks = dict.fromkeys(
        _missing(options, [under.decoding for under in predicted]),
        f"no batch of up to {options.largest} keeps up with --rate",
    ) | dict.fromkeys(_missing(options, settings), "no setting for these --stages and --candidates") | {
        name: f"not in --timings: {', '.join(parts)}; start a server with it once" for name, parts in unmeasured.items()
    }  # fmt: skip
    best = predicted[0]
    sizes = range(best.batch, max(options.largest, best.batch) + 1)
    first = next((size for size in sizes if best.decoding.speedup(size) <= 1), None)
    return Plan(target, predicted, None if first is None else first - 1, lacks)


def heads_of(decoding: Decoding) -> str:
    """The heads that a setting reads, as named in the options."""
    return str(decoding.options.get("model", "none"))


def _missing(options: PlanOptions, settings: Sequence[Decoding]) -> list[str]:
    """The heads of the options that no setting reads."""
    read = set(map(heads_of, settings))
    return [name for name in options.heads if name not in read]


def _settings(name: str, config: HeadsConfig, parts: Parts, target: str, options: PlanOptions) -> Iterator[Decoding]:
    depth = config.target.num_hidden_layers
    machine = machine_of(options, parts.timing, target, depth)
    if options.stages == "2":
        if machine.served is not None:
            raise HeadsError("--timings: a server's steps have one stage; give results of `ppd bench decode`")
        rates = config.match_rates(parts)
        if rates is None:
            raise HeadsError(f"{quoted(name)} has {config.kind} heads; give early heads for a worker group")
        for layer, k, trained, rate in rates:
            if k in options.candidates and (depth + 1) // 2 <= layer < depth:
                served = {**({"model": name} if trained else {}), "exit_layer": layer, "candidates": k}
                yield Group(config.method, served, machine, depth, layer, k, rate, options.new_tokens)
        return
    yield from drafting_settings(name, config, parts, machine, options.texts == "greedy")


def _under_load(decoding: Decoding, options: PlanOptions) -> Predicted | None:
    """A setting at the batch size, or at the smallest that keeps up with the rate (None: none does)."""
    if options.rate is None:
        batch = options.batch or 1
        return Predicted(decoding, batch, decoding.speedup(batch))
    wanted, sizes = options.rate * options.new_tokens, range(1, options.largest + 1)
    ours = next((size for size in sizes if decoding.tokens_a_second(size) >= wanted), None)
    if ours is None:
        return None
    # If vLLM alone does not keep up, compare with it at the same batch size.
    alone = next((size for size in sizes if size / decoding.plain(size) >= wanted), ours)
    return Predicted(decoding, ours, decoding.plain(alone) * decoding.length / decoding.seconds(ours))
