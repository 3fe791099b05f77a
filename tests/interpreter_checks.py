# SPDX-License-Identifier: Apache-2.0
"""Drafting through the Triton kernels, in Triton's interpreter, against drafting
through their torch references.

Run as a script by test_interpreter.py, with TRITON_INTERPRET=1; calls what drafting
calls, without an engine.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from vllm_ppd.kernels import dispatch

used: Counter[str] = Counter()  # kernels that were chosen


def counted(
    reference: Callable[..., Any], find: Callable[..., Any] = dispatch.namesake
) -> Callable[..., Any]:
    used[reference.__name__] += 1
    return find(reference)


dispatch.namesake = counted  # type: ignore[assignment]


def same(run: Callable[[], Any], *kernels: str) -> Any:
    """What both ways give, to float32 rounding; the kernels must have run."""
    os.environ[dispatch.SWITCH] = "0"
    expected = run()
    assert not used, used
    os.environ[dispatch.SWITCH] = "always"
    torch.testing.assert_close(run(), expected, rtol=2e-5, atol=1e-7)
    assert set(used) == set(kernels), used
    used.clear()
    return expected


def heads() -> None:
    """CP's chain and DynaMo's thresholds."""
    from heads_folders import cp_head, draft

    from vllm_ppd.heads.dynamo.config import JointSettings
    from vllm_ppd.heads.dynamo.joint import candidates
    from vllm_ppd.kernels.sampling import Sampling

    unembedding = torch.randn(300, 48)
    hidden = torch.randn(3, 48)
    first = torch.tensor([7, 299, 0])
    for condition in ("none", "recurrent"):
        head = cp_head(48, 300, positions=4, rank=3, condition=condition)
        for parameter in head.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        same(
            lambda head=head: draft(
                head, hidden, first, unembedding, embeddings=unembedding
            ),
            "draft_chain",
        )

    scores = [3 * torch.randn(4, 200) for _ in range(2)]
    first = torch.tensor([1, 2, 3, 4])
    context = torch.randint(200, (4, 9))

    def choose() -> list[torch.Tensor]:
        choice = candidates(scores, settings, first_token=first).back_off(
            settings, context=context
        )
        return [
            choice.draw(Sampling(torch.zeros(4))),
            choice.likeliest.tokens,
            *choice.joints,
        ]

    for penalty in (1.0, 1.5):
        settings = JointSettings(k=20, eps_b=0.02, repetition_penalty=penalty)
        same(choose, "find_peaks", "back_off", "draw_ngrams")


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.inference_mode():
        heads()
    print("same")
