# SPDX-License-Identifier: Apache-2.0
"""Drafting through the Triton kernels, in Triton's interpreter, against drafting through their torch references.

Run as a script by test_interpreter.py, with TRITON_INTERPRET=1; calls what drafting calls, without an engine.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from vllm_ppd.kernels import dispatch

used: Counter[str] = Counter()  # kernels that were chosen


def counted(reference: Callable[..., Any], find: Callable[..., Any] = dispatch.namesake) -> Callable[..., Any]:
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


def reader() -> None:
    """Early exits: no heads, T, classifiers; one best token with its confidence, several candidates."""
    from vllm_ppd.heads.early.module import EarlyHeads
    from vllm_ppd.kernels.early_topk import merge_topk
    from vllm_ppd.vllm_plugins.engine.lm_head import LMHead, Unembedding
    from vllm_ppd.vllm_plugins.methods.early.reader import EarlyReader

    weight, bias = torch.randn(320, 64), torch.randn(320)

    class Head(LMHead):
        """A shard of E*, padded with rows that must never win."""

        tp_size, vocab_size = 1, 300

        def __init__(self, start: int = 0, stop: int = 300) -> None:
            self.vocab_start, self.num_valid, self.shard_size = start, stop - start, stop - start + 20
            padding = torch.full((20,), 1e4)
            self.matrix = Unembedding(weight[start : stop + 20].clone(), torch.cat([bias[start:stop], padding]))

        def logits(self, hidden: torch.Tensor, gather: bool = True) -> torch.Tensor:
            logits = torch.nn.functional.linear(hidden, *self.matrix)
            return logits[:, : self.num_valid] if gather else logits

        def plain(self) -> Unembedding:
            return self.matrix

    adapter: Any = SimpleNamespace(norm=lambda hidden, residual: (hidden + residual).clone())
    state = torch.randn(5, 64), torch.randn(5, 64)
    for heads in (None, EarlyHeads((2, 4), 64), EarlyHeads((2, 4), 64, "classifier", weight[:300])):
        exits = EarlyReader(adapter, Head(), heads)
        for parameter in () if heads is None else heads.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        same(lambda exits=exits: exits.greedy(2, state, with_confidence=True), "unembed_topk")
        same(lambda exits=exits: exits.candidates(4, state, 3), "unembed_topk")

    ranks = [EarlyReader(adapter, Head(*shard), None) for shard in ((0, 170), (170, 300))]

    def exchanged() -> tuple[torch.Tensor, torch.Tensor]:
        best = [rank._shard_topk(2, state, 3, True) for rank in ranks]
        values, ids, logsumexps = (torch.stack(parts, dim=1) for parts in zip(*best, strict=True))
        return merge_topk(values, ids, logsumexps, 3)

    merged = same(exchanged, "unembed_topk")
    whole = EarlyReader(adapter, Head(), None).candidates(2, state, 3)
    assert merged[0].tolist() == whole.tolist()
    used.clear()


def heads() -> None:
    """CP's chain and DynaMo's thresholds."""
    from heads_folders import draft

    from vllm_ppd.heads.cp.module import CPHead
    from vllm_ppd.heads.dynamo.config import JointSettings
    from vllm_ppd.heads.dynamo.joint import candidates
    from vllm_ppd.kernels.sampling import Sampling

    head, unembedding = CPHead(48, positions=4, rank=3), torch.randn(300, 48)
    for parameter in head.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    hidden, first = torch.randn(3, 48), torch.tensor([7, 299, 0])
    same(lambda: draft(head, hidden, first, unembedding), "draft_chain")
    for condition in ("token", "chain", "recurrent"):
        head = CPHead(48, positions=4, rank=3, condition=condition)
        for parameter in head.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        same(lambda head=head: draft(head, hidden, first, unembedding, embeddings=unembedding), "draft_chain")

    scores = [3 * torch.randn(4, 200) for _ in range(2)]
    first = torch.tensor([1, 2, 3, 4])
    context = torch.randint(200, (4, 9))

    def choose() -> list[torch.Tensor]:
        choice = candidates(scores, settings, first_token=first).back_off(settings, context=context)
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
        for part in (reader, heads):
            part()
    print("same")
