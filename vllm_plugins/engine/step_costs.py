# SPDX-License-Identifier: Apache-2.0
"""Step costs of an engine: measured when vLLM has warmed up, or taken from an earlier start."""

import copy
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from vllm import envs
from vllm.distributed import get_tp_group

from vllm_ppd.heads.files import digest_of, digest_of_value
from vllm_ppd.heads.folder import CONFIG_NAME
from vllm_ppd.heads.provenance import processor
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.options import CONFIG_KEY
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, plans_of
from vllm_ppd.vllm_plugins.draft_length.measure import counts_of, measure_table
from vllm_ppd.vllm_plugins.engine.dummy_steps import most_requests, time_steps
from vllm_ppd.vllm_plugins.engine.temporary import (
    temporarily,
    unseen_by_connectors,
)

logger = logging.getLogger("vllm.vllm_ppd")

# Options that do not change steps
NOT_STEPS = {
    "adaptive",
    "step_costs",
    "heads",  # how they were found
    "heads_summary",
    "learn",
    "learn_dir",
}


def costs_of_engine(runner: Any) -> CostTable | None:
    """Costs of the steps of an engine's model runner, the same on all tensor-parallel
    ranks; None if they cannot be measured.
    """
    config = runner.speculator.config
    counts = counts_of(config.num_speculative_tokens, runner.device.type)
    largest = most_requests(runner, plans_of(counts, config.num_exits))
    group = get_tp_group()
    path = cache_file(config, runner.vllm_config)
    cached = group.broadcast_object(
        load(path)
        if config.step_costs == "cached" and group.is_first_rank
        else None
    )
    if cached is not None and cached.counts == counts:
        logger.info("vllm-ppd: step costs from %s: %s", path, summary(cached))
        return cached
    started = time.perf_counter()
    if largest < 1:
        logger.warning(
            "vllm-ppd: step costs cannot be measured with so few KV blocks or such a "
            "short --max-model-len; the choice of the number of drafts starts from a "
            "guess"
        )
        return None
    # Larger batches do not draft
    largest = min(largest, config.disable_by_batch_size or largest)
    # A connector would need the scheduler's metadata of dummy requests. Sampled output
    # must not depend on whether steps were measured; the runner draws seeds with NumPy.
    random = np.random.get_state()  # noqa: NPY002
    counters = runner.speculator.counters
    uncounted = temporarily(counters, values=counters.values.copy())
    with uncounted, unseen_by_connectors(), torch.random.fork_rng():
        table = measure_table(
            partial(time_steps, runner),
            largest,
            counts,
            group.broadcast_object,
            config.num_exits,
        )
    np.random.set_state(random)  # noqa: NPY002
    logger.info(
        "vllm-ppd: step costs measured in %.1f s, for %s: %s",
        time.perf_counter() - started,
        path,
        summary(table),
    )
    if group.is_first_rank:
        try:
            table.save(path)
        except OSError as error:
            logger.warning(
                "vllm-ppd: cannot save step costs for the next start (%s)", error
            )
    return table


def load(path: Path) -> CostTable | None:
    """The table in a file; None if it is missing or damaged."""
    try:
        return CostTable.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def cache_file(config: DraftingConfig, vllm_config: Any) -> Path:
    """The file in vLLM's caches for a model, a machine, and the engine's settings that
    affect a step.
    """
    options = config.model_dump(exclude=NOT_STEPS)
    scheduler = vllm_config.scheduler_config
    device = vllm_config.device_config.device_type
    # All of our options, NOT_STEPS included, are hashed there
    without_ours = copy.copy(vllm_config)
    without_ours.additional_config = {
        key: value
        for key, value in vllm_config.additional_config.items()
        if key != CONFIG_KEY
    }
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    settings = [
        without_ours.compute_hash(),
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        options,
        heads_content(config.model),
        name,
        torch.get_num_threads(),
        torch.__version__,
        platform.version(),  # another version may have faster kernels
    ]
    key = digest_of_value(settings)[:16]
    return Path(envs.VLLM_CACHE_ROOT) / "vllm_ppd_step_costs" / f"{key}.json"


def heads_content(folder: str | None) -> dict[str, str]:
    """Digests of the files that define heads in a folder, which may be trained again in
    place.

    The name of heads on the Hub has a commit, so it needs no digest.
    """
    if folder is None:
        return {}
    files = [
        *Path(folder).glob(CONFIG_NAME),
        *sorted(Path(folder).glob("*.safetensors")),
    ]
    return {path.name: digest_of(path) for path in files}


def summary(table: CostTable) -> str:
    """A summary such as `1 request 5.1 ms, 3 drafts +20 %; 4 requests ...`, with a share
    for each exit.
    """
    most = table.counts[-1]
    parts = []
    for size, row in zip(table.sizes, table.seconds, strict=True):
        shares = [
            f"{seconds / row[0] - 1:+.0%}"
            for plan, seconds in zip(table.plans, row, strict=True)
            if plan.drafts == most
        ]
        parts.append(
            f"{size} request{'s' * (size > 1)} {1000 * row[0]:.1f} ms, {most} drafts "
            f"{' or '.join(shares)}"
        )
    return "; ".join(parts)
