# SPDX-License-Identifier: Apache-2.0
"""A workaround for vLLM 0.32's CPU backend: seeded sampling of prompts that are read in several chunks.

vLLM samples a token for every request of a step, unfinished prompts included, and then sets the generators of these
back by the offset of one draw. A CPU generator has no offset, so a prompt of two chunks ends the engine ("CPU Generator
does not use offset"), with and without speculation. Here such requests draw from the default generator instead: their
tokens are dropped, and their own generators stay where they were.
"""

from typing import Any

import numpy as np


class PrefillGenerators:
    """Mixed into CPUModelRunner (V1)."""

    input_batch: Any
    discard_request_mask: Any  # [batch rows], set in execute_model: requests with an unfinished prompt

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators  # the batch's sampling metadata has the same dictionary
        unfinished = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]) if generators else ()
        held = {row: generators.pop(row) for row in map(int, unfinished) if row in generators}
        try:
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        finally:
            generators.update(held)
