# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup, row by row: a request whose text repeats itself drafts the tokens that
followed, and others keep the method's drafts.

vLLM keeps every token of every request on the device for it. Output does not depend on
the source of a draft (verification.py).
"""

from typing import Any

import numpy as np
import torch

from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.lookup import Texts, look_up
from vllm_ppd.vllm_plugins.engine.device_count import DeviceCounts
from vllm_ppd.vllm_plugins.engine.drafter import LookedUp

LONGEST = 8  # most tokens compared, unless the shortest match is longer
WINDOW = 32768  # latest tokens of a text that are searched


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
        self.states = req_states
        self.matched = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(rows, drafts, dtype=torch.int64, device=device)
        # Of each request row, and one more for padding
        self._found = DeviceCounts(rows + 1, device)

    def find(self, rows: torch.Tensor) -> LookedUp:
        """Look up drafts for request rows.

        Args:
            rows: [requests] int64, -1 for padding, which has no match.
        """
        states = self.states
        matched = self.matched[: len(rows)]
        tokens = self.tokens[: len(rows)]
        chosen(look_up, rows)(
            Texts(states.all_token_ids.gpu, states.total_len.gpu),
            rows,
            self.shortest,
            max(self.shortest, LONGEST),
            WINDOW,
            matched,
            tokens,
        )
        found = matched > 0
        self._found.value[rows] = found.long()
        return LookedUp(found, tokens)

    def found(self, rows: np.ndarray) -> list[int]:
        """Whether request rows had a match in the latest step that the device has ended:
        [rows], 0 or 1.
        """
        matches: list[int] = self._found.seen[rows].tolist()
        return matches
