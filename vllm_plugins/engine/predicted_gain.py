# SPDX-License-Identifier: Apache-2.0
"""A log line at server start about heads that are predicted to gain nothing with this engine's step costs."""

import logging
from typing import Any

from vllm.distributed import get_tp_group

from vllm_ppd.heads import hub
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.io import load_calibration, load_config
from vllm_ppd.heads.planning.gate import TRAIN, best_speedups, without_gain
from vllm_ppd.heads.planning.machine import measured
from vllm_ppd.heads.planning.predict import drafting_settings
from vllm_ppd.heads.planning.timings import Engine, ServedSteps
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.draft_length.costs import MeasuredCosts
from vllm_ppd.vllm_plugins.engine.step_costs import cache_file, described, load

logger = logging.getLogger("vllm.vllm_ppd")


def log_predicted_gain(config: DraftingConfig, vllm_config: Any, costs: MeasuredCosts | None) -> None:
    """Log the batch sizes at which the heads are predicted to gain nothing, and what to do instead.

    Args:
        config: our options.
        vllm_config: vLLM's.
        costs: of this engine's steps (None: those kept by an earlier start with the same steps, if any).
    """
    if config.model is None or config.stages > 1 or not get_tp_group().is_first_rank:
        return
    costs = costs or load(cache_file(config, vllm_config))
    speedups = {} if costs is None else predicted_speedups(config, described(config, vllm_config), costs)
    reason = without_gain(config.model, speedups)
    if not reason:
        return
    gaining = [size for size, speedup in speedups.items() if speedup > 1]
    instead = f"{TRAIN}, or leave them out (--speculative-model ppd drafts by prompt lookup)"
    if config.adaptive:
        advice = "drafting stays off there automatically" + f": {instead}" * (not gaining)
    else:
        instead = f"set disable_by_batch_size to {max(gaining)}" if gaining else instead
        advice = f"adaptive: false drafts regardless, at a loss; leave it out, or {instead}"
    level = logging.INFO if config.adaptive and gaining else logging.WARNING
    logger.log(level, "vllm-ppd: %s; %s", reason, advice)


def predicted_speedups(config: DraftingConfig, engine: Engine, costs: MeasuredCosts) -> dict[int, float]:
    """The best speed-up of this server's drafts by measured batch size; empty without a calibration."""
    try:
        folder = hub.whole_folder(str(config.model))
        heads, parts = load_config(folder), load_calibration(folder)
    except HeadsError as error:
        logger.info("vllm-ppd: cannot predict the gain of these heads: %s", error)
        return {}
    machine = measured(parts.timing.seconds)._replace(served=ServedSteps(**costs.method.model_dump(), engine=engine))
    settings = [
        drafting
        for drafting in drafting_settings(engine.heads, heads, parts, machine, greedy=False)
        if not drafting.unmeasured
        and drafting.options.get("eps_b", config.eps_b) == config.eps_b
        and drafting.setting.drafts == config.num_speculative_tokens
    ]
    sizes = [size for size in costs.method.sizes if size <= (config.disable_by_batch_size or size)]
    return best_speedups(settings, sizes) if settings else {}
