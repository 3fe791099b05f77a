# SPDX-License-Identifier: Apache-2.0
"""What drafting reads of the batch of vLLM's V1 runner: one name for each fact, in one place.

Arrays are views of the runner's own, a row for each request of the batch, and change with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch


class Batch:
    """The batch of a runner.

    Args:
        runner: vLLM's V1 model runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.max_model_len: int = runner.max_model_len

    @property
    def num_requests(self) -> int:
        return int(self._runner.input_batch.num_reqs)

    @property
    def req_ids(self) -> list[str]:
        """The request of each row."""
        ids: list[str] = self._runner.input_batch.req_ids
        return ids

    @property
    def sampling_params(self) -> list[Any]:
        """vLLM's SamplingParams of each row; None for a pooling request."""
        requests = self._runner.requests
        return [requests[req_id].sampling_params for req_id in self.req_ids]

    @property
    def sampling_metadata(self) -> Any:
        """vLLM's SamplingMetadata of the rows."""
        return self._runner.input_batch.sampling_metadata

    @property
    def prompt_lengths(self) -> np.ndarray:
        """[rows] tokens of each prompt."""
        return self._rows(self._runner.input_batch.num_prompt_tokens)

    @property
    def lengths(self) -> np.ndarray:
        """[rows] tokens that each request has so far, prompt and output, drafts not counted."""
        return self._rows(self._runner.input_batch.num_tokens_no_spec)

    @property
    def token_ids(self) -> np.ndarray:
        """[rows, max_model_len] tokens of each request."""
        return self._rows(self._runner.input_batch.token_ids_cpu)

    @property
    def computed(self) -> np.ndarray:
        """[rows] tokens whose KV stood in the cache before this step."""
        return self._rows(self._runner.input_batch.num_computed_tokens_cpu)

    @property
    def starts(self) -> np.ndarray:
        """[rows + 1] the first of the step's tokens of each row, and the number of all."""
        starts: np.ndarray = self._runner.query_start_loc.np[: self.num_requests + 1]
        return starts

    @property
    def input_ids(self) -> np.ndarray:
        """The step's tokens, as the host knows them."""
        ids: np.ndarray = self._runner.input_ids.np
        return ids

    @property
    def emitting(self) -> np.ndarray:
        """[rows] bool, whether the row's prompt ends in this step or has ended: only such rows emit tokens."""
        discarded: np.ndarray = self._rows(self._runner.discard_request_mask.np)
        return ~discarded

    def append(self, row: int, tokens: list[int]) -> None:
        """Give a row tokens that it emitted, where a later stage's runner is the one that learns of them first."""
        batch = self._runner.input_batch
        where = slice(batch.num_tokens_no_spec[row], batch.num_tokens_no_spec[row] + len(tokens))
        batch.token_ids_cpu[row, where] = tokens
        batch.is_token_ids[row, where] = True
        batch.num_tokens_no_spec[row] = where.stop
        self._runner.requests[batch.req_ids[row]].output_token_ids.extend(tokens)

    def sample(self, rows: np.ndarray, logits: torch.Tensor) -> np.ndarray:
        """A token of each of some rows, by vLLM's sampler with the batch's own parameters.

        Args:
            rows: [sampled].
            logits: [sampled, vocabulary].

        Returns:
            [rows] of the whole batch, anything where a row was not sampled.
        """
        metadata, count = self.sampling_metadata, self.num_requests
        if len(rows) < count:
            whole = logits.new_zeros(count, logits.shape[-1])
            logits = whole.index_copy_(0, torch.from_numpy(rows).to(logits.device), logits)
            # A seeded request draws once a token that it emits, and no more.
            chosen = set(rows.tolist())
            metadata = dataclasses.replace(
                metadata, generators={row: g for row, g in metadata.generators.items() if row in chosen}
            )
        sampled = self._runner.sampler(logits=logits, sampling_metadata=metadata)
        return sampled.sampled_token_ids[:, 0].cpu().numpy()

    def _rows(self, values: np.ndarray) -> np.ndarray:
        return values[: self.num_requests]
