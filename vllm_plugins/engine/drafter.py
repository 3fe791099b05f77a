# SPDX-License-Identifier: Apache-2.0
"""The interface of a drafting method: a tensor program from one engine step to the
drafts for the next.

A drafter sees a row a request and works on the device alone: it never waits for it, so
that the same code runs between the steps of a runner that schedules ahead. Differences
between requests (length limits, confidence, back-off) are masks or counts, never
missing rows. Its driver (engine/) provides the inputs and copies the drafts to the
host.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.target import DraftVocabulary, Target


class LookedUp(NamedTuple):
    """Drafts that were looked up in the requests' own texts."""

    # [requests] int32, latest tokens that an earlier place has, too; 0 for no match
    matched: Tensor
    # [requests, K] int64, arbitrary where there is no match
    token_ids: Tensor
    gains: Tensor  # [kinds] int32, above 0 for kinds that are taken

    def kinds(self, first: Tensor) -> Tensor:
        """The kinds of matches, by their length and by whether both sources begin with
        the same draft: [requests] int64.

        Args:
            first: the method's first draft [requests].
        """
        same = first == self.token_ids[:, 0]
        return 2 * self.matched + same.long()

    def taken(self, first: Tensor) -> Tensor:
        """Which requests take these drafts in place of the method's: [requests] bool.

        Args:
            first: the method's first draft [requests].
        """
        return self.gains[self.kinds(first)] > 0


class DraftInputs(NamedTuple):
    """The step that has just ended, with a row for each request that may draft."""

    newest_ids: Tensor  # [requests] int64, the last token that each emitted
    # [requests, hidden] normed state from which the target sampled that token
    hidden: Tensor
    # [requests] int64, index of that state's token within the step's tokens
    places: Tensor
    num_drafts: int  # K, the most drafts of any request
    eps_b: Tensor  # [requests] float32, back-off thresholds
    sampling: Sampling | None  # None: every draft is the best token
    # Drafts that may replace the method's: a method whose drafts run layers of the
    # target must run them over those that are taken.
    looked_up: LookedUp | None


class Drafts(NamedTuple):
    """The drafts after a step."""

    token_ids: Tensor  # [requests, K] int64
    # [requests] int64 usable drafts; None: as many as allowed
    counts: Tensor | None = None


class Drafter(ABC):
    """A drafting method, built once per engine, before vLLM measures the memory left
    for its KV cache.
    """

    vocabulary: DraftVocabulary | None = None  # if the method reads it
    # Requests that propose gets at once, by its memory; None: all
    requests_at_once: int | None = None

    @abstractmethod
    def load(self, config: DraftingConfig, target: Target) -> None:
        """Load the heads for the loaded target, and allocate everything.

        Args:
            config: the server's options.
            target: the loaded target, as drafters may read it.
        """

    def refresh(self) -> None:
        """Copy again what load copied of the target's weights, in place, after these
        have changed.
        """
        if self.vocabulary is not None:
            self.vocabulary.refresh()

    @abstractmethod
    def propose(self, step: DraftInputs) -> Drafts:
        """Draft up to K tokens per request. Called under inference mode; never
        synchronizes with the device.
        """
