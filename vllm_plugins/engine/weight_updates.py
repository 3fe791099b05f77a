# SPDX-License-Identifier: Apache-2.0
"""Weights of the target that change while an engine runs: what drafting has copied of
them is copied again.

vLLM changes weights in two ways: its runner reloads a checkpoint, or a trainer sends
them to its worker.
"""

from collections.abc import Callable
from typing import Any


class UpdatedRunner:
    """Mixed into vLLM's model runners, which then have refresh_copies: copy again what
    drafting copied of the target's weights, in place, after these have changed.
    """

    refresh_copies: Callable[[], None]

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]
        self.refresh_copies()


class UpdatedWorker:
    """Mixed into vLLM's workers."""

    model_runner: Any
    _weight_update_is_draft: bool  # vLLM's

    def finish_weight_update(self) -> None:
        super().finish_weight_update()  # type: ignore[misc]
        if not self._weight_update_is_draft:
            self.model_runner.refresh_copies()
