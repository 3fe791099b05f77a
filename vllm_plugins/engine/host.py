# SPDX-License-Identifier: Apache-2.0
"""What drives a drafter on either of vLLM's runners, by permanent request rows, and never waits for the device.

stage   a runner's adapter gathers the drafter's inputs by request row (staging.py)
draft   DraftInputs -> Drafts, then draft IDs, q(x) and usable drafts by request row: one CUDA graph on runner V2
verify  in the next step: vLLM's rejection sampler with q(x); what a request must not use is rejected or left out
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.v1.worker.gpu.buffer_utils import UvaBuffer

from vllm_ppd.kernels.sampling import is_greedy
from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, DraftInputs, Drafts
from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.engine.requests import RequestOptions
from vllm_ppd.vllm_plugins.engine.staging import GREEDY, KINDS, Kind, Staging
from vllm_ppd.vllm_plugins.engine.target import Target

logger = logging.getLogger("vllm.vllm_ppd")


def buckets(most: int) -> Iterator[int]:
    """Batch sizes, largest first, which takes the most memory; kernels differ by powers of two."""
    yield most
    size = 1 << (most - 1).bit_length() >> 1
    while size:
        yield size
        size >>= 1


class DeviceCounts:
    """A number for each name, in memory of the host that the device adds to.

    The host sees what the device has written so far, a step or two behind. On a device without unified addressing it
    sees nothing.

    Args:
        names: of our counters.
        device: that counts.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names = names
        self._values, self._seen = torch.zeros(len(names), dtype=torch.int64, device=device), np.zeros(0)
        if self._values.device.type == "cpu":
            self._seen = self._values.numpy()
        elif is_uva_available():
            buffer = UvaBuffer(len(names), torch.int64)
            self._values, self._seen = buffer.uva(), buffer.np
        self._taken = np.zeros_like(self._seen)

    def add(self, name: str, requests: torch.Tensor) -> None:
        """Count the requests for which a condition holds: [requests] bool."""
        self._values[self.names.index(name)] += requests.sum()

    def take(self) -> dict[str, int]:
        """What the device has counted since the last call."""
        seen = self._seen.copy()
        new, self._taken = seen - self._taken, seen
        return dict(zip(self.names, new.tolist(), strict=False))


class DraftingHost:
    """An engine's drafter with the state that requests have between steps.

    Args:
        config: our options.
        vllm_config: vLLM's.
        device: where the target is.
        rows: request rows. There is one more, which takes what the padding of CUDA graphs writes, row -1.
        num_drafts: K.
        q_rows: [rows + 1, K, vocabulary] float32, takes q(x) by request row; None: every draft is the best token.
        q_as_logits: whether T log q(x) is stored in place of q(x), for a sampler that divides by the temperature.
        confidence: [rows, K] float32, takes the drafter's confidence in each draft, where it is read.
    """

    drafter: Drafter
    target: Target
    staging: Staging
    shallow: Callable[[int, torch.Tensor], CutState] | None = None  # DraftInputs.shallow

    def __init__(
        self,
        config: DraftingConfig,
        vllm_config: Any,
        device: torch.device,
        rows: int,
        num_drafts: int,
        q_rows: torch.Tensor | None = None,
        q_as_logits: bool = False,
        confidence: torch.Tensor | None = None,
    ) -> None:
        self.config, self.vllm_config, self.device = config, vllm_config, device
        self.rows, self.num_drafts = rows, num_drafts
        self.q_rows, self.q_as_logits, self.confidence = q_rows, q_as_logits, confidence
        self.options = RequestOptions(rows, device)
        self.counters = Counters()
        self._device_counts = DeviceCounts(("invalid_drafts", "confidence_stops"), device)
        self._warned_invalid = False
        self.draft_tokens = torch.zeros(rows, num_drafts, dtype=torch.int64, device=device)
        self.usable = torch.zeros(rows + 1, dtype=torch.int64, device=device)  # drafts of each request row
        self._ordinals = torch.arange(num_drafts, device=device)

    def load(self, model: Any) -> None:
        """Take the loaded target, load the drafter and allocate everything, before vLLM measures the memory left."""
        self.target = Target(model, self.vllm_config, self.device)
        self.drafter = resolve_name(self.config.spec.drafter)()
        self.drafter.load(self.config, self.target)
        self.staging = Staging(
            self.rows,
            self.num_drafts,
            self.target,
            self.drafter,
            self.options,
            "eps_b" in self.config.spec.request_options,
        )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """How drafts may have to be drawn."""
        return (GREEDY,) if self.q_rows is None else KINDS

    def draft(self, requests: int, kind: Kind, num_drafts: int | None = None) -> None:
        """From the staged inputs to the buffers by request row.

        Args:
            requests: of the staged ones, the first so many.
            kind: how drafts are drawn.
            num_drafts: the most drafts of any request; None: K.
        """
        inputs = self.staging.inputs(
            requests, kind, num_drafts or self.num_drafts, self.shallow, self.confidence is not None
        )
        drafts = self.drafter.propose(inputs)
        rows = self.staging.rows[:requests]
        self._store(drafts, rows, inputs)
        if self.q_rows is not None and inputs.sampling is not None and drafts.probs is not None:
            self._store_q(self.q_rows, drafts.probs, rows)

    def _store(self, drafts: Drafts, rows: torch.Tensor, inputs: DraftInputs) -> None:
        counts = inputs.max_drafts
        if drafts.counts is not None:
            counts = torch.minimum(drafts.counts, counts)
        usable = torch.minimum(counts, (drafts.token_ids >= 0).cumprod(dim=1).sum(dim=1))
        self._device_counts.add("invalid_drafts", (rows >= 0) & (usable < counts))
        if self.shallow is not None and drafts.counts is not None:
            self._device_counts.add("confidence_stops", (rows >= 0) & (counts < inputs.max_drafts))
        self.usable[rows] = usable
        made = drafts.token_ids.shape[1]
        # vLLM embeds whatever stands here, so that an INVALID draft must be some token.
        self.draft_tokens[: len(rows), :made] = drafts.token_ids.clamp(min=0)
        if self.confidence is not None:
            assert drafts.confidence is not None
            # Adaptive verification leaves out first what would be rejected anyway.
            known = self._ordinals[:made] < usable[:, None]
            self.confidence[: len(rows)] = torch.where(known, drafts.confidence, 0.0)

    def _store_q(self, store: torch.Tensor, q: torch.Tensor, rows: torch.Tensor) -> None:
        if self.q_as_logits:
            temperature = self.staging.temperature[: len(rows)]
            q = q.log() * torch.where(is_greedy(temperature), 1.0, temperature)[:, None, None]
        made = q.shape[1]
        if self.drafter.vocabulary is not None and q.shape[-1] < store.shape[-1]:
            columns = self.drafter.vocabulary.token_ids
            store[rows[:, None, None], self._ordinals[:made, None], columns] = q
        else:
            store[rows, :made] = q

    def warm_up(self, sizes: Iterable[int], draft: Callable[[int, Kind], None] | None = None) -> None:
        """Draft for nobody at some batch sizes, in every way of drawing: takes the memory and compiles the kernels.

        Args:
            sizes: requests.
            draft: in place of `self.draft`, such as the replay of a CUDA graph.
        """
        on_gpu = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=on_gpu), torch.inference_mode():  # samples must not depend on it
            self.staging.stage_nobody()
            for requests in sizes:
                for kind in self.kinds[::-1]:
                    (draft or self.draft)(requests, kind)

    def valid(self, tokens: np.ndarray, made: np.ndarray) -> np.ndarray:
        """Drafts [requests] before the first INVALID of each request's tokens [requests, K], of which `made` count."""
        usable = ((tokens >= 0) & (np.arange(tokens.shape[1]) < made[:, None])).cumprod(axis=1).sum(axis=1)
        self._count_invalid(int((usable < made).sum()))
        return usable

    def take_counts(self) -> None:
        """Count what the device has counted so far."""
        counted = self._device_counts.take()
        self._count_invalid(counted.pop("invalid_drafts", 0))
        for name, number in counted.items():
            self.counters.add(name, number)

    def _count_invalid(self, requests: int) -> None:
        self.counters.add("invalid_drafts", requests)
        if requests and not self._warned_invalid:
            self._warned_invalid = True
            logger.warning(
                "vllm-ppd: dropped drafts, as what they were taken from is not a distribution (NaN or infinite "
                "logits): the heads are damaged, or of another model; train or copy them anew, see ppd inspect. "
                "Said once, ppd:invalid_drafts counts on"
            )
