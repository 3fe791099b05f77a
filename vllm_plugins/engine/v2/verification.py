# SPDX-License-Identifier: Apache-2.0
"""vLLM's rejection sampler of runner V2, which rejects what a request must not use, and keeps the promise of seeds.

A token that follows drafts is drawn with other random numbers by the rejection sampler than by the sampler, so the
output of a request with a seed would depend on which of its steps had drafts: on its company, on preemptions and on the
prefix cache. Such a request emits the tokens that vLLM's sampler draws at its positions, and a draft is accepted if it
is that token. A draft x is then accepted with probability p(x), as a greedy draft is by the rejection sampler, and the
output is that of vLLM without speculation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_ppd.vllm_plugins.engine.v2.speculator import Speculator


class Verification(RejectionSampler):
    """Verifies the drafts of a speculator; further arguments as vLLM's."""

    def __init__(self, speculator: Speculator, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.speculator = speculator
        self._compiled = False  # whether the kernels for logits as the model gives them are compiled

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> Any:
        unusable = self.speculator.unusable(input_batch)
        if unusable is None:
            unusable = invalid_drafts
        elif invalid_drafts is not None:
            unusable |= invalid_drafts
        if not self._compiled and len(logits) > input_batch.num_reqs:
            self._compiled = True
            self._without_processing(logits, input_batch, draft_logits, unusable)
        return super().__call__(logits, input_batch, draft_logits, unusable)

    def _without_processing(self, *args: Any) -> None:
        """Verify as for greedy requests: vLLM's warm-up compiles its kernels for processed logits (float32) alone."""
        needed = self.sampler.needs_logits_processing
        before = needed.copy()
        needed[:] = False
        try:
            super().__call__(*args)
        finally:
            needed[:] = before

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        processed_logits, sampled, num_sampled = super()._verify(
            logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np, expanded_idx_mapping,
            expanded_local_pos, seq_lens_upper_bound_np, verify_draft_sampled,
        )  # fmt: skip
        states = self.sampler.sampling_states
        seeded = states.seeds_set[idx_mapping_np]
        if seeded.any() and self.watermark_key is None:  # a watermark draws other random numbers
            drawn = gumbel_sample(
                processed_logits, expanded_idx_mapping, states.temperature.gpu, states.seeds.gpu, pos,
                apply_temperature=False, is_drafting=False, use_fp64=self.sampler.use_fp64_gumbel,
            )  # fmt: skip
            tokens, counts = accept_drawn(drawn, verify_draft_sampled, cu_num_logits, sampled.shape[1])
            rows = async_tensor_h2d(seeded, device=sampled.device)
            sampled = torch.where(rows[:, None], tokens.to(sampled.dtype), sampled)
            num_sampled = torch.where(rows, counts.to(num_sampled.dtype), num_sampled)
        return processed_logits, sampled, num_sampled


def accept_drawn(
    drawn: torch.Tensor,  # [logits] the token that the target draws at each position
    drafts: torch.Tensor,  # [logits] the token that each row of logits was computed from; a draft but for the first
    cu_num_logits: torch.Tensor,  # [requests + 1] cumulative rows of logits
    width: int,  # K + 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts as long as they are the tokens drawn.

    Returns:
        (tokens [requests, K + 1] of which the first `counts` are emitted, counts [requests]).
    """
    starts, ends = cu_num_logits[:-1, None].long(), cu_num_logits[1:, None].long()
    places = starts + torch.arange(width, device=drawn.device)
    inside = places.clamp(max=len(drawn) - 1)
    tokens, follows = drawn[inside], drafts[inside[:, 1:]]
    accepted = (tokens[:, :-1] == follows) & (places[:, 1:] < ends)
    return tokens, accepted.cumprod(dim=1).sum(dim=1) + 1
