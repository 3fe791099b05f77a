# SPDX-License-Identifier: Apache-2.0
"""Draws from DynaMo's joint, thresholds applied: Triton against torch."""

import pytest
import torch

from vllm_ppd.kernels import joint_draw as reference
from vllm_ppd.kernels.joint import Likeliest, Top, back_off, peaks_of
from vllm_ppd.kernels.joint_draw_triton import draw_ngrams
from vllm_ppd.kernels.sampling import Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 400


def drawn_from(heads: int, k: int, given: bool, rows: int = 6) -> tuple[list[torch.Tensor], Likeliest, Top]:
    """Joints as of a model, few entries large and many small; rows of every order, one of them all zero."""
    generator = torch.Generator().manual_seed(heads * k)
    top = (3 * torch.randn(heads, rows, VOCAB, generator=generator)).topk(k)
    first = torch.randint(VOCAB, (rows,), generator=generator).to(DEVICE) if given else None
    joints, product = [], torch.ones(rows)
    for order, head in enumerate([*([torch.zeros(rows, 1)] if given else []), *top.values], start=1):
        product = product.unsqueeze(-1) * head.softmax(-1).view(rows, *[1] * (order - 1), -1)
        joints.append((product * torch.rand(product.shape, generator=generator)).to(DEVICE))
    joints[-1][-1] = 0
    candidates = Top(top.values.to(DEVICE), top.indices.to(DEVICE), first)
    eps_b = torch.tensor([0.0, 1e-3, 0.05, 0.2, 1.0, 0.0], device=DEVICE)[:rows]
    return joints, back_off(peaks_of(joints), candidates, eps_b, 0.5), candidates


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize(("blur", "adaptive"), [(1, True), (3, True), (3, False), (5, True)])
@pytest.mark.parametrize(
    ("heads", "k", "given"), [(1, 50, True), (2, 40, True), (2, 20, False), (3, 9, True), (2, 1, True), (4, 3, False)]
)
def test_is_the_reference(heads: int, k: int, given: bool, blur: int, adaptive: bool, seeded: bool) -> None:
    """The same draws with the same random numbers; without them, those of rows that take the likeliest n-gram."""
    numbers = torch.arange(6, device=DEVICE) + (1 << 40)
    sampling = Sampling(torch.ones(6, device=DEVICE), None, None, numbers, numbers)
    if not seeded:
        sampling = Sampling(torch.zeros(6, device=DEVICE))
    arguments = *drawn_from(heads, k, given), blur, adaptive, sampling
    assert torch.equal(draw_ngrams(*arguments), reference.draw_ngrams(*arguments))


@pytest.mark.parametrize("limits", [{"top_k": 3.0}, {"top_p": 0.6}, {"top_k": 5.0, "top_p": 0.8}])
def test_top_k_and_top_p_are_the_references(limits: dict[str, float]) -> None:
    joints, likeliest, top = drawn_from(2, 40, True)
    joints[1][3, 0, 1:] = joints[1][3, 0, 1]  # entries that tie
    limited = {name: torch.full((6,), value, device=DEVICE) for name, value in limits.items()}
    for seed in range(4):
        numbers = torch.arange(6, device=DEVICE) + 1000 * seed
        sampling = Sampling(torch.ones(6, device=DEVICE), **limited, seeds=numbers, positions=numbers)
        arguments = joints, likeliest, top, 1, False, sampling
        assert torch.equal(draw_ngrams(*arguments), reference.draw_ngrams(*arguments))
