# SPDX-License-Identifier: Apache-2.0
"""Clocks that differ between ranks: each tells another cost of drafts, all tell that
drafts pay, and nothing of it is kept.
"""

import random
from typing import Any

from vllm_ppd.vllm_plugins.draft_length.costs import CostTable
from vllm_ppd.vllm_plugins.engine import step_costs


class OtherClock:
    """An extension of vLLM's workers; importing it changes the clock."""


_time_steps = step_costs.time_steps
_noise = random.SystemRandom()  # vLLM seeds the ranks alike


def _other_clock(*arguments: Any) -> list[float]:
    _time_steps(*arguments)
    return [1 + 0.01 * plan.drafts * _noise.random() for plan in arguments[-1]]


step_costs.time_steps = _other_clock
CostTable.save = lambda table, path: None  # type: ignore[method-assign]
