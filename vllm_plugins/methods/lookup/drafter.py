# SPDX-License-Identifier: Apache-2.0
"""What stands in for drafts of requests that have none to look up, where vLLM wants K of every request (runner V2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, Drafts

if TYPE_CHECKING:
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
    from vllm_ppd.vllm_plugins.engine.target import Target


class LookupDrafter(Drafter):
    """Drafts the newest token over again, which costs nothing."""

    def load(self, config: DraftingConfig, target: Target) -> None:
        """There is nothing to load."""

    def propose(self, step: DraftInputs) -> Drafts:
        return Drafts(step.newest_ids[:, None].repeat(1, step.num_drafts))
