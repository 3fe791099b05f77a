# SPDX-License-Identifier: Apache-2.0
"""A warning if hardly any draft is accepted."""

import logging

logger = logging.getLogger("vllm.vllm_ppd")

WINDOW = 1000  # drafts as counted by vLLM: one per request and step
NEAR_ZERO = 0.01  # accepted / drafted tokens


class AcceptanceWatch:
    """Counts in windows of a thousand drafts; warns on the first window near zero, and
    again after a recovery.
    """

    def __init__(self) -> None:
        self.drafts = 0
        self.drafted = 0
        self.accepted = 0
        self.warned = False

    def observe(self, drafts: int, length: int, accepted: int) -> None:
        """Count a step.

        Args:
            drafts: requests with verified drafts.
            length: drafted tokens of each.
            accepted: tokens in all.
        """
        self.drafts += drafts
        self.drafted += drafts * length
        self.accepted += accepted
        if self.drafts < WINDOW:
            return
        rate = self.accepted / self.drafted
        if rate >= NEAR_ZERO:
            self.warned = False
        elif not self.warned:
            self.warned = True
            logger.warning(
                "vllm-ppd: %d of %d drafted tokens were accepted over the last %d "
                "drafts (%.2f %%): drafting costs more time than it gains; use heads "
                "trained for this model, a deeper exit_layer, or no drafting",
                self.accepted,
                self.drafted,
                self.drafts,
                100 * rate,
            )
        self.drafts = 0
        self.drafted = 0
        self.accepted = 0
