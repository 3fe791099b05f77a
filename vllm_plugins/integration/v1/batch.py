# SPDX-License-Identifier: Apache-2.0
"""What drafting reads of the batch of vLLM's V1 runner: one name for each fact, in one place.

Arrays are views of the runner's own, a row for each request of the batch, and change with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np


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

    def _rows(self, values: np.ndarray) -> np.ndarray:
        return values[: self.num_requests]
