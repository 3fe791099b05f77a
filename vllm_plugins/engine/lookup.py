# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup on runner V2, row by row: a request whose text repeats itself drafts
the tokens that followed.

The longest earlier match of the text's last tokens counts, the latest of several;
requests without one keep the method's drafts. Output does not depend on the source of a
draft (verification.py). The kernels are those of vLLM's `ngram_gpu`, which keeps every
token of every request on the device.
"""

from typing import Any

import torch
from vllm.utils.math_utils import cdiv, next_power_of_2
from vllm.v1.worker.gpu.spec_decode.ngram import speculator as ngram

from vllm_ppd.vllm_plugins.engine.drafter import LookedUp

LONGEST = 8  # most tokens compared, unless the shortest match is longer
BLOCK = 256  # places of a text compared per program


class Lookup:
    """Looks up drafts of request rows.

    Args:
        shortest: tokens that must agree with an earlier place.
        rows: request rows.
        drafts: K.
        req_states: vLLM's RequestState.
        device: of the drafts.
    """

    def __init__(
        self,
        shortest: int,
        rows: int,
        drafts: int,
        req_states: Any,
        device: torch.device,
    ) -> None:
        self.shortest = shortest
        self.longest = max(shortest, LONGEST)
        self.states = req_states
        self.max_len: int = req_states.max_model_len
        blocks = cdiv(self.max_len, BLOCK)
        self.scores = torch.zeros(rows, blocks, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(rows, drafts, dtype=torch.int64, device=device)

    def find(self, rows: torch.Tensor) -> LookedUp:
        """Look up drafts for request rows.

        Args:
            rows: [requests] int64, -1 for padding, which has no match.
        """
        states = self.states
        requests = len(rows)
        blocks = self.scores.shape[1]
        num_drafts = self.tokens.shape[1]
        token_ids = states.all_token_ids.gpu
        places = rows.clamp(min=0)
        ended = (rows >= 0).int()
        ngram._ngram_scan_kernel[(requests, blocks)](
            token_ids,
            token_ids.stride(0),
            places,
            states.total_len.gpu,
            ended,
            self.scores,
            self.scores.stride(0),
            self.max_len,
            self.shortest,
            self.longest,
            next_power_of_2(self.longest),
            BLOCK,
        )
        ngram._ngram_finalize_kernel[(requests,)](
            token_ids,
            token_ids.stride(0),
            places,
            states.total_len.gpu,
            ended,
            states.last_sampled_tokens,
            self.scores,
            self.scores.stride(0),
            self.tokens,
            self.max_len,
            blocks,
            num_drafts,
            next_power_of_2(num_drafts),
            next_power_of_2(blocks),
        )
        matched = self.scores[:requests].amax(dim=1) > 0
        return LookedUp(matched, self.tokens[:requests])
