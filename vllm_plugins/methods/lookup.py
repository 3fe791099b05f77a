# SPDX-License-Identifier: Apache-2.0
"""Placeholder drafts for requests without a match on runner V2, where vLLM expects K
drafts of every request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, Drafts

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
    from vllm_ppd.vllm_plugins.engine.target import Target


class LookupDrafter(Drafter):
    """Drafts the newest token again, which costs nothing."""

    def load(self, config: DraftingConfig, target: Target) -> None:
        """Nothing to load."""

    def propose(self, step: DraftInputs) -> Drafts:
        return Drafts(step.newest_ids[:, None].repeat(1, step.num_drafts))
