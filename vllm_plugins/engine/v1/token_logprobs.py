# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen tokens (`logprob_token_ids` of a request), also in steps that verify drafts.

vLLM's V1 sampler returns them instead of the most likely tokens of every other request in the batch, and its rejection
sampler does not return them at all, or fails on their shape. Here each request gets its own: the samplers are asked for
the most likely tokens of every row, and the rows of such a request are filled with the tokens that it chose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class TokenLogprobs:
    """Mixed into GPUModelRunner or CPUModelRunner (V1)."""

    input_batch: Any
    sampler: Any  # vLLM's; its rejection sampler gathers through it, too

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        stock = super()._sample  # type: ignore[misc]
        metadata = self.input_batch.sampling_metadata
        chosen = metadata.logprob_token_ids
        if not chosen:
            return stock(logits, spec_decode_metadata)
        requests, gather = self.input_batch.num_reqs, self.sampler.gather_logprobs

        def gather_chosen(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
            gathered = gather(logprobs, num_logprobs, token_ids)
            fill(gathered, logprobs, chosen, len(logprobs) // requests)
            return gathered

        columns = max(metadata.max_num_logprobs or 0, *map(len, chosen.values()))
        self.sampler.gather_logprobs = gather_chosen
        self.input_batch.sampling_metadata = dataclasses.replace(
            metadata, logprob_token_ids=None, max_num_logprobs=columns
        )
        try:
            return stock(logits, spec_decode_metadata)
        finally:
            self.input_batch.sampling_metadata = metadata
            del self.sampler.gather_logprobs  # the class has its own


def fill(gathered: Any, logprobs: torch.Tensor, chosen: Mapping[int, Sequence[int]], rows_each: int) -> None:
    """Write the chosen tokens of some requests into vLLM's LogprobsTensors, behind the sampled token.

    Args:
        gathered: token ids and log-probabilities, [requests * rows_each, 1 + columns] each; changed in place.
        logprobs: [requests * rows_each, vocabulary].
        chosen: batch row of a request -> its tokens, at most as many as there are columns.
        rows_each: rows of logits a request.
    """
    for request, tokens in chosen.items():
        rows = slice(request * rows_each, (request + 1) * rows_each)
        ids = torch.tensor(tokens, dtype=torch.int64, device=logprobs.device)
        gathered.logprob_token_ids[rows, 1 : 1 + len(tokens)] = ids.to(gathered.logprob_token_ids.dtype)
        gathered.logprobs[rows, 1 : 1 + len(tokens)] = logprobs[rows].index_select(1, ids)
