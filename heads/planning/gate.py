# SPDX-License-Identifier: Apache-2.0
"""The quality gate: a line about heads that are predicted to gain nothing, with the batch sizes."""

from collections.abc import Sequence

from vllm_ppd.heads.in_words import in_words
from vllm_ppd.heads.planning.predict import Decoding
from vllm_ppd.heads.quote import quoted

TRAIN = "train them on more text of more varied kinds"


def best_speedups(settings: Sequence[Decoding], sizes: Sequence[int]) -> dict[int, float]:
    """The highest predicted speed-up of some settings (at least one) at each batch size."""
    return {size: max(setting.speedup(size) for setting in settings) for size in sizes}


def without_gain(name: str, speedups: dict[int, float]) -> str:
    """A sentence, without its full stop, on the batch sizes at which heads gain nothing; empty if there are none.

    Args:
        name: of the heads.
        speedups: by batch size, in units of vLLM's tokens per second.
    """
    losing = {size: speedup for size, speedup in speedups.items() if speedup <= 1}
    if not losing:
        return ""
    best = f"at best {max(losing.values()):.2f} of vLLM's tokens per second"
    where = "every batch size" if len(losing) == len(speedups) else f"batch size{'s' * (len(losing) > 1)}"
    return f"the heads in {quoted(name)} are predicted to gain nothing at {where} ({in_words([*losing])}): {best}"
