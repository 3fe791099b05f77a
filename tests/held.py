# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of the heads."""

import gc
from typing import Any

from vllm_ppd.vllm_plugins.engine.target import PackedLinear


class Held:
    """An extension of vLLM's workers."""

    def numbers_held(self: Any) -> int:
        """Numbers in the matrices that this rank reads for drafts."""
        gc.unfreeze()  # an engine's objects
        return sum(
            found.layer.output_size_per_partition * found.layer.input_size
            for found in gc.get_objects()
            if type(found) is PackedLinear
        )
