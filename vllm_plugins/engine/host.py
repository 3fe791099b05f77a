# SPDX-License-Identifier: Apache-2.0
"""The driver of a drafter, over permanent request rows; never waits for the device.

stage   a runner's adapter gathers the drafter's inputs by request row (staging.py)
draft   DraftInputs -> Drafts, then draft IDs on the device: one CUDA graph
verify  in the next step, by the tokens that the target draws (v2/verification.py); drafts that a request must not use
        are rejected
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.v1.worker.gpu.buffer_utils import UvaBuffer

from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.drafts import finish
from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.drafter import Drafter, Drafts, LookedUp
from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.engine.requests import RequestOptions, Setting
from vllm_ppd.vllm_plugins.engine.staging import Staging
from vllm_ppd.vllm_plugins.engine.target import Target

logger = logging.getLogger("vllm.vllm_ppd")


def buckets(most: int) -> Iterator[int]:
    """Batch sizes, largest first, which takes the most memory; kernels differ by powers of two."""
    yield most
    size = 1 << (most - 1).bit_length() >> 1
    while size:
        yield size
        size >>= 1


class DeviceCount:
    """A number in the host's memory to which the device adds.

    The host reads what the device has written so far, a step or two behind. On a device without unified addressing it
    reads 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.value, self._seen, self._taken = torch.zeros(1, dtype=torch.int64, device=device), np.zeros(1), 0
        if self.value.device.type == "cpu":
            self._seen = self.value.numpy()
        elif is_uva_available():
            buffer = UvaBuffer(1, torch.int64)
            self.value, self._seen = buffer.uva(), buffer.np

    def take(self) -> int:
        """The device's count since the last call."""
        before, self._taken = self._taken, int(self._seen[0])
        return self._taken - before


class DraftingHost:
    """An engine's drafter, with the state of requests between steps.

    Args:
        config: our options.
        vllm_config: vLLM's.
        device: where the target is.
        rows: request rows. There is one more, row -1, to which the padding of CUDA graphs writes.
        num_drafts: K.
        sampled: whether drafts of sampling requests are drawn, with the target's own random numbers; else every draft
            is the best token.
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
    ) -> None:
        self.config, self.vllm_config, self.device = config, vllm_config, device
        self.rows, self.num_drafts = rows, num_drafts
        self.sampled = sampled
        vocab_size = vllm_config.model_config.get_vocab_size()
        self.options = RequestOptions(rows, num_drafts, vocab_size, device, config.verify)
        self.counters = Counters()
        self._invalid = DeviceCount(device)
        self._warned_invalid = False
        self.draft_tokens = torch.zeros(rows, num_drafts, dtype=torch.int64, device=device)

    def load(self, model: Any) -> None:
        """Load the drafter for the loaded target and allocate everything, before vLLM measures the memory left."""
        self.target = Target(model, self.vllm_config, self.device)
        self.drafter = resolve_name(self.config.spec.drafter)()
        self.drafter.load(self.config, self.target)
        reads_eps_b = "eps_b" in self.config.spec.request_options
        self.staging = Staging(self.rows, self.target, self.drafter, self.options, reads_eps_b)
        # vLLM embeds the placeholder of an INVALID draft, so it must be a token of the draft vocabulary.
        vocabulary = self.drafter.vocabulary
        self._stand_in = 0 if vocabulary is None else int(vocabulary.token_ids[0])

    def samples(self, rows: np.ndarray) -> bool:
        """Whether any of some request rows has drafts drawn at its temperature; else each draft is the best token."""
        return self.sampled and not self.options.is_greedy[rows].all()

    def draft_on_device(self, requests: int, sampled: bool, looked_up: LookedUp | None = None) -> Drafts:
        """Draft, and leave the tokens that the next step embeds and verifies on the device; part of a CUDA graph.

        Args:
            requests: the number of staged requests.
            sampled: whether drafts are drawn.
            looked_up: drafts that replace the method's where there is a match.
        """
        inputs = self.staging.inputs(requests, sampled, self.num_drafts, self.shallow, looked_up)
        drafts = self.drafter.propose(inputs)
        rows, most = self.staging.rows[:requests], self.staging.setting(Setting.MAX_DRAFTS, requests)
        chosen(finish, rows)(
            drafts.token_ids, drafts.counts, rows, most, self._stand_in, self.draft_tokens,
            self._invalid.value,
        )  # fmt: skip
        if looked_up is not None:
            tokens = self.draft_tokens[:requests]
            torch.where(looked_up.matched[:, None], looked_up.token_ids, tokens, out=tokens)
        return drafts

    def warm_up(self, sizes: Iterable[int], draft: Callable[[int, bool], Any] | None = None) -> None:
        """Draft for padding at some batch sizes, sampled and greedily, to allocate memory and compile kernels.

        Args:
            sizes: requests.
            draft: in place of `self.draft_on_device`, such as the replay of a CUDA graph.
        """
        on_gpu = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=on_gpu), torch.inference_mode():  # must not influence samples
            self.staging.stage_nobody()
            for requests in sizes:
                for sampled in (True, False) if self.sampled else (False,):
                    (draft or self.draft_on_device)(requests, sampled)

    def take_counts(self) -> None:
        """Add the device's counts to ours."""
        requests = self._invalid.take()
        self.counters.add("invalid_drafts", requests)
        if requests and not self._warned_invalid:
            self._warned_invalid = True
            logger.warning(
                "vllm-ppd: dropped drafts with NaN or infinite logits: the heads "
                "are damaged, or made for another model; train or copy them again, see ppd inspect. Further cases are "
                "only counted (ppd:invalid_drafts)"
            )
