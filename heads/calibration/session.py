# SPDX-License-Identifier: Apache-2.0
"""State that the parts of a calibration share: the target, the heads, and texts that are made once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn import functional

from vllm_ppd.heads.calibration.options import CalibrationOptions
from vllm_ppd.heads.calibration.text import Padded, Texts, generate, record_prompts, take_prompts
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.draft_vocabulary import compared
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.measured import Timed, Timing
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

WINDOW = 512  # tokens per window for perplexities, if documents are that long
REPEATS = 20  # of each timed operation
SHORTEST_WINDOW = 32  # in shorter windows, few tokens are followed by as many as heads predict


class Calibration:
    """Heads on their target, and texts, each made when a part first asks.

    Args:
        options: what to measure.
        config, tensors: of the heads.
        target: loaded.
    """

    def __init__(
        self, options: CalibrationOptions, config: Any, tensors: dict[str, torch.Tensor], target: Target
    ) -> None:
        self.options, self.config, self.tensors, self.target = options, config, tensors, target
        self._written: dict[Any, Texts] = {}

    def autocast(self) -> Any:
        """A context in which heads run in the target's arithmetic."""
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.options.precision == "bfloat16")

    @cached_property
    def prompts(self) -> Padded:
        """The records' own, or stretches of their texts."""
        options, target = self.options, self.target
        longest = (target.max_length or 1 << 30) - options.new_tokens
        prompts = record_prompts(options.data, target, options.prompts, longest)
        return prompts or Padded(take_prompts(options.data, target, options.prompts, options.prompt_tokens), None)

    @cached_property
    def greedy(self) -> Texts:
        return self.write(0.0)

    @cached_property
    def sampled(self) -> Texts:
        return self.write(self.options.temperature)

    def texts(self) -> Iterator[tuple[str, Texts]]:
        """The greedy texts and the sampled ones, by the names that parts have for them."""
        yield "greedy", self.greedy
        yield f"T {self.options.temperature:g}", self.sampled

    def write(self, temperature: float, **sampling: Any) -> Texts:
        """Texts of the target after the prompts; the same texts for the same temperature and sampling."""
        key = (temperature, *sorted(sampling.items()))
        if key not in self._written:
            torch.manual_seed(self.options.seed)
            size, (ids, starts, _) = max(32, self.options.batch), self.prompts
            self._written[key] = generate(
                self.target, ids, self.options.new_tokens, temperature, size, starts, **sampling
            )
        return self._written[key]

    @cached_property
    def windows(self) -> list[Batch]:
        """The data itself in unpacked windows of the same length, for teacher-forced likelihoods.

        Raises:
            TrainingError: if no document has SHORTEST_WINDOW tokens.
        """
        options, target = self.options, self.target
        length, count = _lengths(options.data, target, options.prompts)
        prompts = take_prompts(options.data, target, count, length, report=False)
        positions = torch.arange(length, device=prompts.device)
        return [Batch(ids, positions.expand(len(ids), -1)) for ids in prompts.split(options.batch)]

    @property
    def device_name(self) -> str:
        """The name of the device, as vLLM has it."""
        device = self.target.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    def timing(self) -> Timing:
        """Seconds of a layer and an LM head by batch size, and the cost of heads that follows from them.

        The cost of a transform is computed from its weights: timed alone it would be read from the processor's cache.
        """
        target = self.target
        seconds = time_layers(target, self.options.batch_sizes, self.autocast)
        smallest = min(self.options.batch_sizes)
        layers, lm_head = target.num_layers * seconds.layer[smallest], seconds.lm_head[smallest]
        weights = sum(parameter.numel() for parameter in target.layers[-1].parameters())
        return Timing(
            seconds=seconds,
            lm_head_share=round(lm_head / (layers + lm_head), 4),
            transform_in_layers=round(target.hidden_size**2 / weights, 4),
        )

    def vocabularies(self) -> list[tuple[torch.Tensor, float]]:
        """Draft vocabularies shorter than the whole, each with the share of the training text that it covers."""
        if self.config.counts_tensor is None:
            return []
        shorter = compared(self.tensors[self.config.counts_tensor], self.config.draft_vocab_size)
        return [(token_ids.to(self.target.device), round(share, 4)) for token_ids, share in shorter]


def _lengths(data: Sequence[str], target: Target, most: int) -> tuple[int, int]:
    """Tokens of a window, and how many windows the data holds.

    Where no document has WINDOW tokens, a window has as many as the longest document.
    """
    windows = longest = as_long = 0
    documents = Documents(data, lambda: target.tokenizer, report=False)
    for ids in documents.token_ids():
        windows += len(documents.special.pieces(ids, WINDOW))
        if windows >= most:
            return WINDOW, most
        if len(ids) > longest:
            longest, as_long = len(ids), 0
        as_long += len(ids) == longest
    if windows:
        return WINDOW, windows
    if longest < SHORTEST_WINDOW:
        raise TrainingError(
            f"the longest document of the data has {longest} tokens, and likelihoods need at least "
            f"{SHORTEST_WINDOW}; give longer documents"
        )
    return longest, min(as_long, most)


@torch.no_grad()
def time_layers(target: Target, batch_sizes: tuple[int, ...], autocast: Any) -> Timed:
    """Median seconds of one decoder layer and of one read of the LM head, for one token per request.

    They are timed with transformers' eager modules, without KV history: good for ratios, not for a server's times.
    """
    layers, lm_heads = {}, {}
    for size in batch_sizes:
        ids = torch.zeros(size, 1, dtype=torch.int64, device=target.device)
        with autocast():
            call = target.run(Batch(ids, torch.zeros_like(ids)), stem=True).stem
            assert call is not None
            args, kwargs = call
            hidden = target.run(Batch(ids, torch.zeros_like(ids))).final.to(target.unembedding.dtype)
            layer = partial(target.layers[-1], *args, **kwargs)
            layers[size] = _median(layer, target.device)
            head = partial(functional.linear, hidden, target.unembedding, target.bias)
            lm_heads[size] = _median(head, target.device)
    return Timed(layer=layers, lm_head=lm_heads)


def _median(call: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(REPEATS + 3):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[3:])
