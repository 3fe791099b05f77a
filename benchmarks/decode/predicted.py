# SPDX-License-Identifier: Apache-2.0
"""Predicted speed-ups of what `ppd bench decode` measured, for the column beside the measured ones.

Heads: `ppd plan`, with the acceptance of their calibration, on greedy or sampled texts as the run's, and the seconds of
vLLM's steps in the same file. Where drafting is adaptive, the best number of drafts up to the contender's is predicted,
none among them. Worker groups: PPD's Theorem 4.1, with the match rate that was measured.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm_ppd.benchmarks.decode.group import STAGES, matched, split_of
from vllm_ppd.benchmarks.decode.table import rows_of
from vllm_ppd.benchmarks.harness.results import Measured, Row
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.io import load_config, read_calibration
from vllm_ppd.heads.planning.options import PlanOptions
from vllm_ppd.heads.planning.plan import all_settings
from vllm_ppd.heads.planning.predict import Decoding, Drafting
from vllm_ppd.vllm_plugins.config.options import parse_options
from vllm_ppd.vllm_plugins.config.resolve import resolve
from vllm_ppd.vllm_plugins.registry import METHODS

Predictions = dict[str, dict[str, float]]  # speed-ups by contender and batch size


def predictions(measured: Measured, out: str, num_layers: int) -> Predictions:
    """Speed-ups of all contenders that can be predicted.

    Args:
        measured: a run.
        out: the file that it is in.
        num_layers: of the target.
    """
    options = measured.run["options"]
    predicted: Predictions = {}
    unknown: dict[str, str] = {}  # why, by contender
    for row in rows_of(measured):
        name, identity = row["contender"], measured.contenders[row["contender"]]
        config = identity["speculative_config"]
        if config is None or config.get("method", "ppd") not in METHODS or "prompt_lookup_min" in config:
            continue  # what a text repeats is no property of heads
        try:
            if identity["engine"].items() >= STAGES.items():
                speed_up = _of_group(row, config, num_layers, options["new_tokens"])
            elif "model" in config:
                speed_up = _of_heads(row["batch"], config, options, out, num_layers)
            else:
                continue
        except HeadsError as error:
            unknown[name] = str(error)
            continue
        if speed_up is not None:
            predicted.setdefault(name, {})[str(row["batch"])] = round(speed_up, 3)
    for name, reason in unknown.items():
        print(f"{name}: no prediction: {reason}")
    return predicted


def _of_group(row: Row, config: dict[str, Any], num_layers: int, new_tokens: int) -> float | None:
    split = split_of(config, num_layers)
    match = matched(row, num_layers, split, config.get("candidates", 1), new_tokens)
    return num_layers / match.paper.latency if match is not None else None


def _of_heads(
    batch: int, config: dict[str, Any], options: dict[str, Any], out: str, num_layers: int
) -> float | None:  # fmt: skip
    """None if the contender's settings, or the temperature, were not calibrated.

    Raises:
        HeadsError: if the heads cannot be read or have no calibration.
    """
    folder, temperature = config["model"], options["temperature"]
    heads = load_config(folder)
    if temperature not in (0, read_calibration(folder)["options"]["temperature"]):
        return None
    asked = resolve(parse_options({"method": heads.method, **config}), num_layers, heads)
    plan = PlanOptions.model_validate({
        "heads": (folder,), "texts": "sampled" if temperature else "greedy", "timings": out, "model": options["model"],
    })  # fmt: skip
    calibrated = [way for way in all_settings(plan)[1] if _fits(way.options, asked)]
    size = asked.draft_vocab_size
    exact = [way for way in calibrated if way.options.get("draft_vocab_size") == size]
    # Shorter vocabularies are calibrated on sampled texts alone: the whole one's acceptance, at the part's cost.
    chosen = exact or [_reading(way, (size or 0) / heads.target.vocab_size) for way in calibrated]
    best = max((way.speedup(batch) for way in chosen), default=None)
    return best if best is None or not asked.adaptive else max(best, 1.0)


def _fits(options: dict[str, Any], asked: Any) -> bool:
    """Whether a contender may draft with a calibrated setting."""
    drafts, most = options["num_speculative_tokens"], asked.num_speculative_tokens
    return (
        "model" in options
        and (drafts <= most if asked.adaptive else drafts == most)
        and options.get("exit_layer") in (None, *(asked.exit_layer or ()))
        and options.get("eps_b") in (None, asked.eps_b)
        and options.get("draft_vocab_size") in (None, asked.draft_vocab_size)
    )


def _reading(way: Decoding, share: float) -> Decoding:
    """The same with drafts that read a share of the LM head."""
    assert isinstance(way, Drafting)
    return dataclasses.replace(way, setting=way.setting._replace(reads=way.setting.reads * share))
