# SPDX-License-Identifier: Apache-2.0
"""The plan: every setting of the given heads under a load, the best one, and from which batch size on to stop."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.heads.calibration.recommend import Setting, settings
from vllm_ppd.heads.calibration.run import NAME
from vllm_ppd.heads.calibration.tables import table
from vllm_ppd.heads.checkpoint import HeadsError, load_config
from vllm_ppd.heads.config import EarlyConfig, HeadsConfig
from vllm_ppd.heads.planning.machine import machine_of
from vllm_ppd.heads.planning.options import PlanOptions
from vllm_ppd.heads.planning.predict import Way, drafting, group

SHOWN = (1, 2, 4, 8, 16, 32)  # batch sizes of the table
METHOD = {"early": "ppd", "cp": "cp", "dynamo": "dynamo"}


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

    @property
    def best(self) -> Predicted | None:
        """The best way, or None if none of them gains."""
        return self.ways[0] if self.ways and self.ways[0].speedup > 1 else None


def make_plan(options: PlanOptions) -> Plan:
    """Predict every setting that was calibrated.

    Raises:
        HeadsError: on heads without a finished calibration, of different targets, or of a kind without a group.
    """
    ways: list[Way] = []
    targets = []
    for folder in options.heads:
        config, result = load_config(folder), _calibration(folder)
        targets.append(options.model or config.verifier)
        if targets[-1] != targets[0]:
            raise HeadsError(f"{folder!r} has heads for {targets[-1]}, the others for {targets[0]}; plan one target")
        ways += _ways(folder, config, result["parts"], targets[0], options)
    if not ways:
        raise HeadsError(f"no setting of {', '.join(options.heads)} can be planned for; see --stages and --lanes")
    predicted = [found for way in ways if (found := _under_load(way, options)) is not None]
    if not predicted:
        raise HeadsError(
            f"{options.rate:g} requests a second of {options.new_tokens} tokens are more than one replica decodes in "
            f"batches of up to {options.largest}; give a lower --rate"
        )
    predicted.sort(key=lambda found: -found.speedup)
    best = predicted[0]
    losing = (size for size in range(best.batch, options.largest + 1) if best.way.speedup(size) <= 1)
    first = next(losing, None)
    return Plan(targets[0], predicted, None if first is None else first - 1)


def _calibration(folder: str) -> dict[str, Any]:
    path = Path(folder) / NAME
    try:
        result = json.loads(path.read_text())
    except FileNotFoundError:
        result = {}
    except ValueError as error:
        raise HeadsError(f"{path} is no JSON ({error}); run `ppd calibrate {folder}` again") from None
    if not result.get("finished"):
        raise HeadsError(f"heads in {folder!r} have no finished calibration; run `ppd calibrate {folder} --data FILE`")
    return result


def _ways(folder: str, config: HeadsConfig, parts: dict[str, Any], target: str, options: PlanOptions) -> Iterator[Way]:
    depth = config.target.num_hidden_layers
    machine = machine_of(options.hardware, parts["timing"], target)
    if options.stages == "2":
        if not isinstance(config, EarlyConfig):
            raise HeadsError(f"{folder!r} has {config.kind} heads; a worker group drafts with early heads")
        yield from _groups(folder, parts["matches"], depth, machine, options)
        return
    for setting in settings(config, parts, greedy=options.texts == "greedy"):
        served = _served(setting, folder if setting.trained else None)
        yield drafting(setting, METHOD[config.kind], served, machine, depth)


def _groups(folder: str, matches: dict[str, Any], depth: int, machine: Any, options: PlanOptions) -> Iterator[Way]:
    for lanes in options.lanes:
        for form, rates in matches["match"].get(str(lanes), {}).items():
            for layer, rate in zip(matches["layers"], rates, strict=True):
                if (depth + 1) // 2 <= layer < depth:
                    model = {"model": folder} if form == "Y" else {}
                    served = {**model, "exit_layer": layer, "lanes": lanes}
                    yield group(rate, layer, lanes, served, machine, depth)


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


FLAGS = {
    "num_speculative_tokens": "--spec-tokens",
    "exit_layer": "--ppd-exit-layer",
    "eps_b": "--ppd-eps-b",
    "draft_vocab_size": "--ppd-draft-vocab-size",
    "lanes": "--ppd-lanes",
}


def command(plan: Plan, stages: str) -> str:
    """The command line that serves the best way; vLLM alone where none gains."""
    words = ["vllm", "serve", plan.target] + (["--pipeline-parallel-size", stages] if stages != "1" else [])
    if plan.best is not None:
        served = plan.best.way.options
        words += ["--speculative-model", served.get("model", plan.best.way.method)]
        for name, flag in FLAGS.items():
            words += [flag, str(served[name])] if name in served else []
        words += ["--ppd-disable-by-batch-size", str(plan.stop_at)] if plan.stop_at else []
    return shlex.join(words)


def report(plan: Plan, options: PlanOptions) -> str:
    """Markdown: the best settings, then what is recommended and how to serve it."""
    load = f"{options.rate:g} requests a second of {options.new_tokens} tokens" if options.rate else (
        f"batch {options.batch or 1}"
    )  # fmt: skip
    machine = "times of the calibration" if options.hardware is None else (
        "a roofline of {:g} GB/s and {:g} TFLOP/s, link {:g} us".format(*options.hardware)
    )  # fmt: skip
    header = ["heads", "setting", "tokens a step", "compute", "batch", "speed-up", *(f"b={size}" for size in SHOWN)]
    rows = [
        [
            found.way.options.get("model", "none"), _setting(found.way), f"{found.way.length:.3f}",
            f"{found.way.compute:.2f}", found.batch, f"{found.speedup:.3f}",
            *(f"{found.way.speedup(size):.2f}" for size in SHOWN),
        ]
        for found in plan.ways[: options.top]
    ]  # fmt: skip
    texts = options.texts if options.stages == "1" else "greedy"
    blocks = [
        f"Predicted for {plan.target}, {load}, {texts} texts; {machine}",
        table(header, rows),
        "Speed-up in units of vLLM's own tokens a second on the same machine; compute of a token in its own units; "
        f"{len(plan.ways)} settings considered. Prompts, KV reads and the host's work are left out.",
    ]
    if plan.best is None:
        blocks.append("Recommended: no drafting; no setting of these heads gains under this load")
    else:
        stop = f"stop drafting above {plan.stop_at} requests" if plan.stop_at else (
            f"drafting gains up to {options.largest} requests"
        )  # fmt: skip
        blocks.append(f"Recommended: {_setting(plan.best.way)}, {plan.best.speedup:.2f}x; {stop}")
    return "\n\n".join([*blocks, f"    {command(plan, options.stages)}"])


def _setting(way: Way) -> str:
    names = {"num_speculative_tokens": "n", "exit_layer": "exit", "draft_vocab_size": "vocabulary", "lanes": "k"}
    parts = [f"{names.get(name, name)} {value}" for name, value in way.options.items() if name != "model"]
    return f"{way.method}, {', '.join(parts)}"
