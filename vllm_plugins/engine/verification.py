# SPDX-License-Identifier: Apache-2.0
"""Verification on runner V2: every token is the one that vLLM's sampler draws at its
position, with or without drafts.

vLLM's rejection sampler keeps the distribution, but draws other random numbers for a
token that follows drafts than its sampler does, so the output of a request with a seed
would depend on which of its steps had drafts: on other requests, preemptions and the
prefix cache. Here the sampler draws, and a draft is accepted if it is the token drawn.
Output is that of vLLM without speculation whatever is drafted, and no q(x) has to be
kept. Drafters draw with the same random numbers (kernels/sampling.py), or a draft x would
be accepted with probability p(x) alone.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import accept_drawn
from vllm_ppd.vllm_plugins.engine.staging import DeviceCounts

LARGEST = 128  # rows of logits; kernels for more rows are the same


class Verification(RejectionSampler):
    """Verifies the drafts of a speculator; further arguments are vLLM's."""

    def __init__(self, speculator: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.speculator = speculator
        # Whether vLLM's kernel is compiled for the model's logits
        self._compiled = False
        # [rows of logits] request rows of the current chunk
        self._rows: Tensor | None = None
        self._token_ids = 0  # most logprob_token_ids of a request of the batch

    def __call__(
        self,
        logits: Tensor,
        input_batch: Any,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> Any:
        unusable = self.speculator.unusable(input_batch)
        if unusable is None:
            unusable = invalid_drafts
        elif invalid_drafts is not None:
            unusable |= invalid_drafts
        self._token_ids = 0
        # vLLM gathers the log-probabilities of sharded requests without those of
        # logprob_token_ids.
        config = self.speculator.vllm_config.parallel_config
        if not config.enable_batch_sharded_sampling:
            states = self.sampler.logprob_token_ids_state
            self._token_ids = states.max_num_token_ids(input_batch.idx_mapping_np)
        return super().__call__(logits, input_batch, draft_logits, unusable)

    def _verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._rows = expanded_idx_mapping
        processed_logits = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        states = self.sampler.sampling_states
        # vLLM's warm-up only uses processed logits (float32), which greedy requests do
        # not need.
        for given in (
            (processed_logits,) if self._compiled else (logits, processed_logits)
        ):
            drawn = gumbel_sample(
                given,
                expanded_idx_mapping,
                states.temperature.gpu,
                states.seeds.gpu,
                pos,
                apply_temperature=False,
                is_drafting=False,
                use_fp64=self.sampler.use_fp64_gumbel,
            )
        self._compiled = True
        unverified = self.speculator.unverified
        if unverified is not None:
            drawn = unverified.emit(
                drawn, verify_draft_sampled, expanded_local_pos
            )
        width = self.num_speculative_steps + 1
        sampled, num_sampled = chosen(accept_drawn, drawn)(
            drawn, verify_draft_sampled, cu_num_logits, width
        )
        return processed_logits, sampled, num_sampled

    def _get_logprobs_tensors(
        self, sampled: Tensor, num_sampled: Tensor, logits: Tensor, *args: Any
    ) -> LogprobsTensors | None:
        """As vLLM's sampler returns them, with those of logprob_token_ids, which its
        rejection sampler omits.
        """
        if not self._token_ids:
            return super()._get_logprobs_tensors(
                sampled, num_sampled, logits, *args
            )
        *places, num_logprobs = args
        emitted = super()._get_logprobs_tensors(
            sampled, num_sampled, logits, *places, 0
        )
        return compute_topk_scores(
            logits,
            max(num_logprobs, 0),
            emitted.logprob_token_ids[:, 0].contiguous(),
            emitted.cu_num_generated_tokens
            or emitted.cu_num_generated_tokens_tensor,
            self.sampler.logprob_token_ids_state,
            self._rows,
            self._token_ids,
            self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


def warm_up_top_p(rows: int, vocab_size: int, device: torch.device) -> None:
    """Compile vLLM's kernels for top-p, by the number of rows of logits; they stay in
    Triton's cache on disk.

    vLLM compiles them when it first serves such a batch, in a second or two, and drafts
    bring further sizes. On CUDA it leaves out its own warm-up, which compiles every
    combination with top-k and takes minutes.

    Args:
        rows: most rows.
        vocab_size: V.
        device: of the logits.
    """
    powers = min(rows, LARGEST).bit_length()
    for power in range(powers):
        size = 1 << power
        apply_top_k_top_p(
            torch.zeros(size, vocab_size, device=device),
            None,
            torch.full((size,), 0.9, device=device),
        )


class UnverifiedDrafts:
    """Drafts that the next step emits, by request row.

    Args:
        rows: request rows.
        device: of the drafts.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        # Row -1 takes padding. A CUDA graph writes them.
        self.counts = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.emitted = DeviceCounts(1, device)

    def beyond(self, batch: Any) -> Tensor:
        """Which of a step's logits belong to drafts that are not emitted: [logits] bool."""
        return batch.expanded_local_pos > self.counts[batch.expanded_idx_mapping]

    def emit(self, sampled: Tensor, drafts: Tensor, local_pos: Tensor) -> Tensor:
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
