# SPDX-License-Identifier: Apache-2.0
"""The facts about the batch of vLLM's V1 runner that drafting reads.

Arrays are views of the runner's own, with a row for each request of the batch, and change with it.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_ppd.vllm_plugins.engine.metrics import Counters


class Batch:
    """The batch of a runner.

    Args:
        runner: vLLM's V1 model runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    @property
    def max_model_len(self) -> int:
        """The runner's, which vLLM may reduce to what fits into the KV cache."""
        return int(self._runner.max_model_len)

    @property
    def num_requests(self) -> int:
        return int(self._runner.input_batch.num_reqs)

    @property
    def req_ids(self) -> list[str]:
        """The request of each row."""
        ids: list[str] = self._runner.input_batch.req_ids
        return ids

    @property
    def prompt_lengths(self) -> np.ndarray:
        """[rows] tokens of each prompt."""
        return self._rows(self._runner.input_batch.num_prompt_tokens)

    @property
    def lengths(self) -> np.ndarray:
        """[rows] tokens that each request has so far, prompt and output without drafts."""
        return self._rows(self._runner.input_batch.num_tokens_no_spec)

    @property
    def token_ids(self) -> np.ndarray:
        """[rows, max_model_len] tokens of each request."""
        return self._rows(self._runner.input_batch.token_ids_cpu)

    @property
    def computed(self) -> np.ndarray:
        """[rows] tokens whose KV was in the cache before this step."""
        return self._rows(self._runner.input_batch.num_computed_tokens_cpu)

    @property
    def starts(self) -> np.ndarray:
        """[rows + 1] index of each row's first token in the step, and the number of all tokens."""
        starts: np.ndarray = self._runner.query_start_loc.np[: self.num_requests + 1]
        return starts

    @property
    def emitting(self) -> np.ndarray:
        """[rows] bool, whether the row's prompt ends in this step or has ended: only such rows emit tokens."""
        discarded: np.ndarray = self._rows(self._runner.discard_request_mask.np)
        return ~discarded

    def _rows(self, values: np.ndarray) -> np.ndarray:
        return values[: self.num_requests]


def with_counts(output: Any, counters: Counters) -> Any:
    """A step's output with the counts since the previous one attached; shared placeholder outputs are left alone."""
    if isinstance(output, ModelRunnerOutput) and output is not EMPTY_MODEL_RUNNER_OUTPUT:
        counters.attach(output)
    return output


class Step(NamedTuple):
    """The results of an engine step."""

    sampled_token_ids: list[list[int]]  # emitted tokens per batch row; empty if the prompt is unfinished
    verified: Any  # vLLM's SpecDecodeMetadata; None if the batch had no drafts to verify
    sampling: Any  # the batch's SamplingMetadata
    hidden_states: torch.Tensor  # [tokens, hidden] normed

    @property
    def num_draft_tokens(self) -> list[int] | None:
        """Drafts that each batch row verified; None if there were none in the batch."""
        return None if self.verified is None else self.verified.num_draft_tokens

    def last_tokens(self, rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """The index in the step of the token that gave the last emitted one, for batch rows [requests]: [requests].

        Args:
            rows: [requests]
            starts: [batch rows + 1] index of each row's first token, and the number of all tokens.
        """
        last = starts[rows + 1].astype(np.int64) - 1
        if self.num_draft_tokens is None:
            return last
        emitted = np.array([len(self.sampled_token_ids[row]) for row in rows], dtype=np.int64)
        return last - np.array(self.num_draft_tokens, dtype=np.int64)[rows] + emitted - 1
