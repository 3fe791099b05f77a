# SPDX-License-Identifier: Apache-2.0
"""What an engine step of vLLM's V1 runner came to, as drafting reads it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_ppd.vllm_plugins.engine.metrics import Counters


def with_counts(output: Any, counters: Counters) -> Any:
    """A step's output, with what was counted since the one before; what is no output of its own is left alone."""
    if isinstance(output, ModelRunnerOutput) and output is not EMPTY_MODEL_RUNNER_OUTPUT:
        counters.attach(output)
    return output


class Step(NamedTuple):
    """What an engine step came to."""

    sampled_token_ids: list[list[int]]  # emitted tokens a batch row; empty where the prompt is not done
    verified: Any  # vLLM's SpecDecodeMetadata; None if the batch had no drafts to verify
    sampling: Any  # the batch's SamplingMetadata
    sample_hidden_states: torch.Tensor  # [sampled rows, hidden] normed

    @property
    def num_draft_tokens(self) -> list[int] | None:
        """Drafts that each batch row verified; None if there were none in the batch."""
        return None if self.verified is None else self.verified.num_draft_tokens

    def last_rows(self, rows: np.ndarray) -> np.ndarray:
        """Of batch rows [requests], the sampled row that gave the last emitted token: [requests]."""
        if self.num_draft_tokens is None:
            return rows
        emitted = np.fromiter(map(len, self.sampled_token_ids), dtype=np.int64, count=len(self.sampled_token_ids))
        widths = np.array(self.num_draft_tokens, dtype=np.int64) + 1
        starts = np.cumsum(widths) - widths
        return (starts + emitted - 1)[rows]

    def last_tokens(self, rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Of batch rows [requests], the token of the step that gave the last emitted token: [requests].

        Args:
            rows: [requests]
            starts: [batch rows + 1] the first token of each row, and the number of all.
        """
        last = starts[rows + 1].astype(np.int64) - 1
        if self.num_draft_tokens is None:
            return last
        emitted = np.array([len(self.sampled_token_ids[row]) for row in rows], dtype=np.int64)
        return last - np.array(self.num_draft_tokens, dtype=np.int64)[rows] + emitted - 1
