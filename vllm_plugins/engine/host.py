# SPDX-License-Identifier: Apache-2.0
"""What drives a drafter on either of vLLM's runners, by permanent request rows, and never waits for the device.

stage   a runner's adapter gathers the drafter's inputs by request row (staging.py)
draft   DraftInputs -> Drafts, then draft IDs on the device: one CUDA graph on runner V2
verify  in the next step: by the tokens that the target draws (v2/verification.py), on runner V1 by vLLM's rejection
        sampler with q(x); what a request must not use is rejected or left out
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

from vllm_ppd.kernels.dispatch import chosen, enabled
from vllm_ppd.kernels.drafts import finish
from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, Drafts
from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.engine.requests import RequestOptions, Setting
from vllm_ppd.vllm_plugins.engine.staging import GREEDY, SAMPLED, TRUNCATED, Kind, Staging
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
        names: of our counters, as kernels/drafts.py has them.
        device: that counts.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names = names
        self.values, self._seen = torch.zeros(len(names), dtype=torch.int64, device=device), np.zeros(0)
        if self.values.device.type == "cpu":
            self._seen = self.values.numpy()
        elif is_uva_available():
            buffer = UvaBuffer(len(names), torch.int64)
            self.values, self._seen = buffer.uva(), buffer.np
        self._taken = self._seen.tolist()

    def take(self) -> dict[str, float]:
        """What the device has counted since the last call; nothing in most steps."""
        seen = self._seen.tolist()
        if seen == self._taken:
            return {}
        new = {name: now - before for name, now, before in zip(self.names, seen, self._taken, strict=True)}
        self._taken = seen
        return new


class DraftingHost:
    """An engine's drafter with the state that requests have between steps.

    Args:
        config: our options.
        vllm_config: vLLM's.
        device: where the target is.
        rows: request rows. There is one more, which takes what the padding of CUDA graphs writes, row -1.
        num_drafts: K.
        sampled: whether drafts of sampling requests are drawn; else every draft is the best token.
        keyed: whether they are drawn with the target's own random numbers.
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
        sampled: bool,
        keyed: bool = False,
        confidence: torch.Tensor | None = None,
    ) -> None:
        self.config, self.vllm_config, self.device = config, vllm_config, device
        self.rows, self.num_drafts = rows, num_drafts
        self.sampled, self.confidence = sampled, confidence
        self.options = RequestOptions(rows, num_drafts, vllm_config.model_config.get_vocab_size(), device, keyed)
        self.counters = Counters()
        self._device_counts = DeviceCounts(("invalid_drafts", "confidence_stops"), device)
        self._warned_invalid = False
        self.draft_tokens = torch.zeros(rows, num_drafts, dtype=torch.int64, device=device)

    def load(self, model: Any) -> None:
        """Take the loaded target, load the drafter and allocate everything, before vLLM measures the memory left."""
        self.target = Target(model, self.vllm_config, self.device)
        self.drafter = resolve_name(self.config.spec.drafter)()
        self.drafter.load(self.config, self.target)
        reads_eps_b = "eps_b" in self.config.spec.request_options
        self.staging = Staging(self.rows, self.target, self.drafter, self.options, reads_eps_b)
        # vLLM embeds whatever stands in place of an INVALID draft: a token that is drafted from.
        vocabulary = self.drafter.vocabulary
        self._stand_in = 0 if vocabulary is None else int(vocabulary.token_ids[0])

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """How drafts may have to be drawn."""
        if not self.sampled:
            return (GREEDY,)
        return (GREEDY, SAMPLED) if enabled(self.draft_tokens) else (GREEDY, SAMPLED, TRUNCATED)

    def kind(self, rows: np.ndarray) -> Kind:
        """How drafts of some request rows are drawn, by what the host knows of them."""
        if not self.sampled or self.options.is_greedy[rows].all():
            return GREEDY
        return TRUNCATED if TRUNCATED in self.kinds and self.options.limited(rows) else SAMPLED

    def draft(self, requests: int, kind: Kind, num_drafts: int | None = None, with_probs: bool = False) -> Drafts:
        """Draft for the first so many of the staged requests.

        Args:
            requests: that are staged.
            kind: how drafts are drawn.
            num_drafts: the most drafts of any request; None: K.
            with_probs: whether q(x) is asked for.
        """
        most, with_confidence = num_drafts or self.num_drafts, self.confidence is not None
        inputs = self.staging.inputs(requests, kind, most, self.shallow, with_probs, with_confidence)
        return self.drafter.propose(inputs)

    def draft_on_device(self, requests: int, kind: Kind) -> None:
        """Draft, and leave what the next step embeds and verifies on the device; a CUDA graph holds this."""
        drafts = self.draft(requests, kind)
        rows, most = self.staging.rows[:requests], self.staging.setting(Setting.MAX_DRAFTS, requests)
        confidence = None
        if self.confidence is not None:
            assert drafts.confidence is not None
            confidence = drafts.confidence, self.confidence
        counted = self._device_counts.values
        chosen(finish, rows)(
            drafts.token_ids, drafts.counts, rows, most, self._stand_in, self.draft_tokens, confidence, counted
        )

    def warm_up(self, sizes: Iterable[int], draft: Callable[[int, Kind], None] | None = None) -> None:
        """Draft for nobody at some batch sizes, in every way of drawing: takes the memory and compiles the kernels.

        Args:
            sizes: requests.
            draft: in place of `self.draft_on_device`, such as the replay of a CUDA graph.
        """
        on_gpu = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=on_gpu), torch.inference_mode():  # samples must not depend on it
            self.staging.stage_nobody()
            for requests in sizes:
                for kind in self.kinds[::-1]:
                    (draft or self.draft_on_device)(requests, kind)

    def valid(self, tokens: np.ndarray, made: np.ndarray) -> np.ndarray:
        """Drafts [requests] before the first INVALID of each request's tokens [requests, K], of which `made` count."""
        usable = ((tokens >= 0) & (np.arange(tokens.shape[1]) < made[:, None])).cumprod(axis=1).sum(axis=1)
        self._count_invalid(int((usable < made).sum()))
        return usable

    def take_counts(self) -> None:
        """Count what the device has counted so far."""
        counted = self._device_counts.take()
        self._count_invalid(int(counted.get("invalid_drafts", 0)))
        if self.shallow is not None:  # a back-off, which counts alike, is no stop of early drafting
            self.counters.add("confidence_stops", counted.get("confidence_stops", 0))

    def _count_invalid(self, requests: int) -> None:
        self.counters.add("invalid_drafts", requests)
        if requests and not self._warned_invalid:
            self._warned_invalid = True
            logger.warning(
                "vllm-ppd: dropped drafts, as what they were taken from is not a distribution (NaN or infinite "
                "logits): the heads are damaged, or of another model; train or copy them anew, see ppd inspect. "
                "Said once, ppd:invalid_drafts counts on"
            )
