# SPDX-License-Identifier: Apache-2.0
"""Drafts that were dropped because what they were taken from is not a distribution: counted, and logged once."""

from __future__ import annotations

import logging

from vllm_ppd.vllm_plugins.engine.metrics import Counters

logger = logging.getLogger("vllm.vllm_ppd")


class InvalidDrafts:
    """Counts them for an engine's worker, on either runner."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._logged = False

    def add(self, requests: int) -> None:
        """Count so many requests whose drafts were dropped in a step."""
        self.counters.add("invalid_drafts", requests)
        if requests and not self._logged:
            self._logged = True
            logger.warning(
                "vllm-ppd: dropped drafts, as what they were taken from is not a distribution (NaN or infinite "
                "logits): the heads are damaged, or of another model; train or copy them anew, see ppd inspect. "
                "Said once, ppd:invalid_drafts counts on"
            )
