# SPDX-License-Identifier: Apache-2.0
"""Top-p as a logits processor for the CPU backend, where vLLM sorts the vocabulary of every row and step.

Of 128 rows of 49,152 logits, the sort takes over half a second of a core, four times a small model's pass.
"""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from vllm_ppd.kernels.top_p import mask_top_p
from vllm_ppd.vllm_plugins.engine.generation import TOP_P


class TopP(LogitsProcessor):
    """Reads a request's top-p from its extra arguments; vLLM calls it after the temperature."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._wanted: dict[int, float] = {}
        self._rows = torch.empty(0, dtype=torch.int64)
        self._top_p = torch.empty(0)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self._wanted, batch_update, _top_p):
            self._rows = torch.tensor(list(self._wanted), dtype=torch.int64)
            self._top_p = torch.tensor(list(self._wanted.values()), dtype=torch.float32)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if len(self._rows) == len(logits):
            return mask_top_p(logits, torch.empty(len(logits)).index_copy_(0, self._rows, self._top_p))
        if len(self._rows):
            logits[self._rows] = mask_top_p(logits[self._rows], self._top_p)
        return logits


def _top_p(params: Any, prompt: list[int] | None, output: list[int]) -> float | None:
    top_p = (params.extra_args or {}).get(TOP_P)
    return None if top_p is None else float(top_p)
