# SPDX-License-Identifier: Apache-2.0
"""A plan as a table, a recommendation and the command line that serves it."""

from __future__ import annotations

import shlex

from vllm_ppd.heads.calibration.tables import table
from vllm_ppd.heads.planning.fleet import Fleet
from vllm_ppd.heads.planning.options import PlanOptions
from vllm_ppd.heads.planning.plan import SHOWN, Plan, Predicted, heads_of, without_ways
from vllm_ppd.heads.planning.predict import Way

FLAGS = {
    "num_speculative_tokens": "--spec-tokens",
    "exit_layer": "--ppd-exit-layer",
    "eps_b": "--ppd-eps-b",
    "draft_vocab_size": "--ppd-draft-vocab-size",
    "candidates": "--ppd-candidates",
}


def command(target: str, way: Way | None, stop_at: int | None, stages: str) -> str:
    """The command line that serves a way; vLLM alone if there is none."""
    words = ["vllm", "serve", target] + (["--pipeline-parallel-size", stages] if stages != "1" else [])
    if way is not None:
        words += ["--speculative-model", way.options.get("model", way.method)]
        for name, flag in FLAGS.items():
            words += [flag, str(way.options[name])] if name in way.options else []
        words += ["--ppd-disable-by-batch-size", str(stop_at)] if stop_at else []
    return shlex.join(words)


def report(plan: Plan, options: PlanOptions) -> str:
    """Markdown: the best settings, then what is recommended and how to serve it."""
    load = f"{options.rate:g} requests a second of {options.new_tokens} tokens" if options.rate else (
        f"batch {options.batch or 1}"
    )  # fmt: skip
    machine = "times of the calibration" if options.timings is None else f"vLLM's own steps in {options.timings}"
    if options.hardware is not None:
        machine = "a roofline of {:g} GB/s and {:g} TFLOP/s, link {:g} us".format(*options.hardware)
    header = ["heads", "setting", "tokens a step", "compute", "batch", "speed-up", *(f"b={size}" for size in SHOWN)]
    rows = [
        [
            heads_of(found.way), setting_of(found.way), f"{found.way.length:.3f}", f"{found.way.compute:.2f}",
            found.batch, f"{found.speedup:.3f}", *(f"{found.way.speedup(size):.2f}" for size in SHOWN),
        ]
        for found in _shown(plan, options)
    ]  # fmt: skip
    rows += [[name, reason, *["-"] * (len(header) - 2)] for name, reason in plan.lacks.items()]
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
        blocks.append(f"Recommended: {setting_of(plan.best.way)}, {plan.best.speedup:.2f}x; {stop}")
    return "\n\n".join(
        [*blocks, f"    {command(plan.target, plan.best and plan.best.way, plan.stop_at, options.stages)}"]
    )


def _shown(plan: Plan, options: PlanOptions) -> list[Predicted]:
    """The best settings, and the best one of heads that have none among these."""
    best = plan.ways[: options.top]
    missing = dict.fromkeys(name for name in options.heads if name not in {heads_of(found.way) for found in best})
    firsts = (next((found for found in plan.ways if heads_of(found.way) == name), None) for name in missing)
    return [*best, *(found for found in firsts if found is not None)]


def fleet_report(target: str, fleets: list[Fleet], options: PlanOptions) -> str:
    """Markdown: replicas, latency and cost of vLLM alone and of each way, what is recommended and how to serve it."""
    gpus = options.gpus * int(options.stages)
    alone, best = fleets[0], fleets[1]
    rows = []
    for one in fleets:
        name = "vLLM alone" if one.way is None else f"{one.way.options.get('model', 'no heads')}: {setting_of(one.way)}"
        paid = "-" if one.replicas is None else f"{one.replicas * gpus * options.gpu_hour:.2f}"
        saved = "-" if not one.replicas or not alone.replicas else f"{100 * (1 - one.replicas / alone.replicas):.1f}%"
        rows.append([name, one.replicas or "none is enough", f"{one.latency:.3f}", paid, saved])
    ways = [one.way for one in fleets if one.way is not None]
    rows += [[f"{name}: {reason}", *["-"] * 4] for name, reason in without_ways(options, ways).items()]
    gains = best.replicas is not None and (alone.replicas is None or best.replicas < alone.replicas)
    way = best.way if gains else None
    if all(one.replicas is None for one in fleets):
        fastest = min(fleets, key=lambda one: one.latency)
        name = "vLLM alone" if fastest.way is None else setting_of(fastest.way)
        advice = [f"The target cannot be met, not even with what is fastest ({name}): {fastest.lacks}"]
    else:
        recommended = "no drafting; it saves no replica" if way is None else setting_of(way)
        advice = [f"Recommended: {recommended}", f"    {command(target, way, None, options.stages)}"]
    return "\n\n".join([
        f"Fleet for {target}: {options.rate:g} requests a second of {options.new_tokens} tokens on average, 95 % of "
        f"them within {options.latency:g} s; GPUs a replica: {gpus}, at {options.gpu_hour:g} an hour",
        table(["decoding", "replicas", "95th percentile, s", "cost an hour", "saving"], rows),
        "Requests of exponentially distributed lengths arrive at random and go to the replica with the fewest; drafts "
        "are made where they gain. Prompts, KV reads and the host's work are left out.",
        *advice,
    ])  # fmt: skip


def setting_of(way: Way) -> str:
    names = {"num_speculative_tokens": "n", "exit_layer": "exit", "draft_vocab_size": "vocabulary", "candidates": "k"}
    parts = [f"{names.get(name, name)} {value}" for name, value in way.options.items() if name != "model"]
    return f"{way.method}, {', '.join(parts)}"
