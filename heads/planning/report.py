# SPDX-License-Identifier: Apache-2.0
"""A plan as a table, a recommendation and the command line to serve it."""

import shlex
from collections.abc import Iterator

from vllm_ppd.heads.in_words import table
from vllm_ppd.heads.planning.gate import TRAIN, best_speedups, without_gain
from vllm_ppd.heads.planning.options import PlanOptions
from vllm_ppd.heads.planning.plan import SHOWN, Plan, Predicted, heads_of
from vllm_ppd.heads.planning.predict import Decoding

FLAGS = {
    "num_speculative_tokens": "--spec-tokens",
    "exit_layer": "--ppd-exit-layer",
    "eps_b": "--ppd-eps-b",
    "draft_vocab_size": "--ppd-draft-vocab-size",
    "candidates": "--ppd-candidates",
}
SHORT = {"num_speculative_tokens": "n", "exit_layer": "exit", "draft_vocab_size": "vocabulary", "candidates": "k"}


def command(target: str, decoding: Decoding | None, stop_at: int | None, stages: str) -> str:
    """The command line to serve a setting; vLLM alone if there is none."""
    words = ["vllm", "serve", target] + (["--pipeline-parallel-size", stages] if stages != "1" else [])
    if decoding is not None:
        words += ["--speculative-model", decoding.options.get("model", decoding.method)]
        for name, flag in FLAGS.items():
            words += [flag, str(decoding.options[name])] if name in decoding.options else []
        words += ["--ppd-disable-by-batch-size", str(stop_at)] if stop_at else []
    return shlex.join(words)


def report(plan: Plan, options: PlanOptions) -> str:
    """Markdown: the best settings, then the recommendation and how to serve it."""
    load = f"{options.rate:g} requests per second of {options.new_tokens} tokens" if options.rate else (
        f"batch {options.batch or 1}"
    )  # fmt: skip
    machine = "the calibration's times" if options.timings is None else f"vLLM's own steps in {options.timings}"
    if options.hardware is not None:
        machine = "a roofline of {:g} GB/s and {:g} TFLOP/s, link {:g} us".format(*options.hardware)
    left_out = "Times exclude prompts, KV reads and the host's work."
    if plan.served is not None:
        machine = f"a server's step costs, host time included ({options.timings})"
        left_out = "Times exclude prompts, long contexts and the scheduler."
    header = ["heads", "setting", "tokens per step", "compute", "batch", "speed-up", *(f"b={size}" for size in SHOWN)]
    rows = [
        [
            heads_of(decoding), setting_of(decoding), f"{decoding.length:.3f}", f"{decoding.compute:.2f}", batch,
            f"{speedup:.3f}", *(f"{decoding.speedup(size):.2f}" for size in SHOWN),
        ]
        for decoding, batch, speedup in _shown(plan, options)
    ]  # fmt: skip
    rows += [[name, reason, *["-"] * (len(header) - 2)] for name, reason in plan.lacks.items()]
    texts = options.texts if options.stages == "1" else "greedy"
    advice, best = "no drafting, as no setting of these heads gains under this load", None
    if plan.best is not None:
        best = plan.best.decoding
        stop = f"stop drafting above {plan.stop_at} requests" if plan.stop_at else (
            f"drafting gains up to {max(options.largest, plan.best.batch)} requests"
        )  # fmt: skip
        advice = f"{setting_of(best)}, {plan.best.speedup:.2f}x; {stop}"
    return "\n\n".join([
        f"Predicted for {plan.target}, {load}, {texts} texts; {machine}",
        table(header, rows),
        "Speed-up: tokens per second relative to vLLM alone on the same machine. Compute: that of a token, likewise. "
        f"{left_out} {len(plan.predicted)} settings were considered.",
        *_warnings(plan, options),
        f"Recommended: {advice}",
        f"    {command(plan.target, best, plan.stop_at, options.stages)}",
    ])  # fmt: skip


def _warnings(plan: Plan, options: PlanOptions) -> Iterator[str]:
    """A line for each of the heads that gain neither under the load nor at a batch size of the table."""
    for name in options.heads:
        predicted = [under for under in plan.predicted if heads_of(under.decoding) == name]
        speedups = best_speedups([under.decoding for under in predicted], SHOWN) if predicted else {}
        if predicted and max(*speedups.values(), *(under.speedup for under in predicted)) <= 1:
            yield f"Warning: {without_gain(name, speedups)}; {TRAIN}, or leave them out."


def _shown(plan: Plan, options: PlanOptions) -> list[Predicted]:
    """The best settings, and the best of each of the heads without one among these."""
    shown = plan.predicted[: options.top]
    for name in options.heads:
        if name not in {heads_of(under.decoding) for under in shown}:
            shown += [under for under in plan.predicted if heads_of(under.decoding) == name][:1]
    return shown


def setting_of(decoding: Decoding) -> str:
    """A setting on a line."""
    values = [f"{SHORT.get(name, name)} {value}" for name, value in decoding.options.items() if name != "model"]
    return f"{decoding.method}, {', '.join(values)}"
