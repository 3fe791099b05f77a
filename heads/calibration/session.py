# SPDX-License-Identifier: Apache-2.0
"""State that the parts of a calibration share: the target, the heads, and texts that
are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch

from vllm_ppd.heads.calibration.options import CalibrationOptions
from vllm_ppd.heads.calibration.text import Texts, generate, take_prompts
from vllm_ppd.heads.draft_vocabulary import most_frequent
from vllm_ppd.heads.measured import Timing
from vllm_ppd.heads.training.target import Target


class Calibration:
    """Heads on their target, and texts, each made when a part first asks.

    Args:
        options: what to measure.
        config, tensors: of the heads.
        target: loaded.
    """

    def __init__(
        self,
        options: CalibrationOptions,
        config: Any,
        tensors: dict[str, torch.Tensor],
        target: Target,
    ) -> None:
        self.options = options
        self.config = config
        self.tensors = tensors
        self.target = target

    def autocast(self) -> Any:
        """A context in which heads run in the target's arithmetic."""
        enabled = self.options.precision == "bfloat16"
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=enabled)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """The records' own, or pieces of their texts."""
        options = self.options
        longest = (self.target.max_length or 1 << 30) - options.new_tokens
        length = min(options.prompt_tokens, longest)
        return take_prompts(options.data, self.target, options.prompts, length, longest)

    @cached_property
    def greedy(self) -> Texts:
        return generate(self.target, self.prompts, self.options.new_tokens)

    @cached_property
    def sampled(self) -> Texts:
        torch.manual_seed(self.options.seed)
        options = self.options
        return generate(
            self.target, self.prompts, options.new_tokens, options.temperature
        )

    def texts(self) -> Iterator[tuple[str, Texts]]:
        """The greedy texts and the sampled ones, by the names that parts have for them."""
        yield "greedy", self.greedy
        yield f"T {self.options.temperature:g}", self.sampled

    def timing(self) -> Timing:
        """The weights of the LM head relative to a pass, and of a d x d matrix relative
        to a layer.
        """
        layers = sum(tensor.numel() for tensor in self.target.layers.parameters())
        lm_head = self.target.unembedding.numel()
        matrix = self.target.hidden_size**2
        return Timing(
            lm_head_share=round(lm_head / (layers + lm_head), 4),
            transform_in_layers=round(matrix * self.target.num_layers / layers, 4),
        )

    def draft_vocabulary(self) -> torch.Tensor | None:
        """The token IDs of the heads' own draft vocabulary; None if it is the whole one."""
        size = self.config.draft_vocab_size
        counts = self.config.counts_tensor
        if counts is None or size in (None, self.target.vocab_size):
            return None
        return most_frequent(self.tensors[counts], size).to(self.target.device)


def parts_of(measure: Callable[..., Any]) -> dict[str, Callable[[Calibration], Any]]:
    """The parts of heads that draft from a vocabulary, by their names in
    calibration.json.

    Args:
        measure: maps a calibration, texts and the token IDs of a draft vocabulary
            (None: the whole) to what is stored of them.
    """

    def acceptance(calibration: Calibration) -> dict[str, Any]:
        return {
            name: measure(calibration, texts, None)
            for name, texts in calibration.texts()
        }

    def vocabulary(calibration: Calibration) -> dict[int, Any]:
        token_ids = calibration.draft_vocabulary()
        if token_ids is None:
            return {}
        return {len(token_ids): measure(calibration, calibration.sampled, token_ids)}

    return {
        "timing": Calibration.timing,
        "acceptance": acceptance,
        "vocabulary": vocabulary,
    }
