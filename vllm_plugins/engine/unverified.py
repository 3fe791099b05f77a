# SPDX-License-Identifier: Apache-2.0
"""DynaMo's own decoding (Algorithm 1) on runner V2: drafts are emitted whatever the
target would draw.

This is not the target's output. The target samples the first token of an n-gram. The
joint, conditioned on that token, gives the others, and the next step computes them like
verified drafts, so their KV is the target's own. If the joint backs off to one token,
that token is vLLM's own sample. With eps_b = 1 nothing differs from ordinary sampling.
"""

from typing import Any

import torch

from vllm_ppd.vllm_plugins.engine.device_count import DeviceCount


class UnverifiedDrafts:
    """Drafts that the next step emits, by request row.

    Args:
        rows: request rows.
        device: of the drafts.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        # Row -1 takes padding. A CUDA graph writes them.
        self.counts = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.emitted = DeviceCount(device)

    def beyond(self, batch: Any) -> torch.Tensor:
        """Which of a step's logits belong to drafts that are not emitted: [logits] bool."""
        return batch.expanded_local_pos > self.counts[batch.expanded_idx_mapping]

    def emit(
        self,
        sampled: torch.Tensor,
        drafts: torch.Tensor,
        local_pos: torch.Tensor,
    ) -> torch.Tensor:
        """The drafts in place of the tokens that the target samples at their positions:
        [logits].

        Args:
            sampled: [logits] the target's samples.
            drafts: [logits] the input token of each row of logits, -1 for a draft that
                is not emitted.
            local_pos: [logits] index of the row of logits within its request.
        """
        next_draft = drafts.roll(-1)
        is_emitted = (local_pos.roll(-1) > 0) & (next_draft >= 0)
        self.emitted.value += is_emitted.sum()
        return torch.where(is_emitted, next_draft.to(sampled.dtype), sampled)
