# SPDX-License-Identifier: Apache-2.0
"""Unembedding and top-k in one pass: Triton against torch.

Most states and weights are small integers: their products are exact in any order of summation and any type, so ids,
ties included, must be the same ones.
"""

import pytest
import torch

from vllm_ppd.kernels import unembed_topk_triton
from vllm_ppd.kernels.early_topk import ShardTopK
from vllm_ppd.kernels.sampling import INVALID
from vllm_ppd.kernels.unembed_topk import unembed_topk as reference
from vllm_ppd.kernels.unembed_topk_triton import unembed_topk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def integers(*shape: int, dtype: torch.dtype, most: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-most, most + 1, shape, generator=generator).to(device=DEVICE, dtype=dtype)


def lowest_ids(
    hidden: torch.Tensor, weights: torch.Tensor, k: int, start: int, valid: int, **options: object
) -> ShardTopK:
    """The reference, with ties in the order that the kernel promises."""
    actual = reference(hidden, weights, k, start, valid, **options)  # type: ignore[arg-type]
    bias = options.get("bias")
    logits = torch.nn.functional.linear(hidden, weights, bias)[:, :valid].float()  # type: ignore[arg-type]
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]
    torch.testing.assert_close(actual.values, logits.gather(1, order), rtol=0, atol=0, equal_nan=True)
    return ShardTopK(actual.values, torch.where(actual.values.isfinite(), order + start, INVALID), actual.logsumexp)


def same(actual: ShardTopK, expected: ShardTopK) -> None:
    torch.testing.assert_close(actual.values, expected.values, rtol=0, atol=0, equal_nan=True)
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert actual.token_ids.dtype == torch.int64
    torch.testing.assert_close(actual.logsumexp, expected.logsumexp, rtol=2e-6, atol=2e-6, equal_nan=True)


@TYPES
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize(("rows", "vocab", "width"), [(1, 257, 64), (5, 300, 72), (17, 8, 200)])
def test_shapes_off_the_blocks(dtype: torch.dtype, k: int, rows: int, vocab: int, width: int) -> None:
    hidden, weights = integers(rows, width, dtype=dtype, most=1), integers(vocab + 7, width, dtype=dtype)
    weights[vocab:] = 100  # padding must never win
    same(unembed_topk(hidden, weights, k, 1000, vocab), lowest_ids(hidden, weights, k, 1000, vocab))


@TYPES
@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (32_000, 1), (151_936, 1), (151_936, 4)])
def test_vocabularies(dtype: torch.dtype, vocab: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(unembed_topk_triton, "BLOCK_V", 8192)  # the interpreter counts operations, not numbers
    hidden, weights = integers(2, 48, dtype=dtype), integers(vocab, 48, dtype=dtype)
    same(unembed_topk(hidden, weights, k, 0, vocab), lowest_ids(hidden, weights, k, 0, vocab))


@TYPES
def test_random_numbers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weights = (torch.randn(n, 96, generator=generator).to(device=DEVICE, dtype=dtype) for n in (6, 700))
    actual, expected = unembed_topk(hidden, weights, 4, 0, 700), reference(hidden, weights, 4, 0, 700)
    step = 2**-7 if dtype == torch.bfloat16 else 1e-5  # a unit in the last place
    torch.testing.assert_close(actual.values, expected.values, rtol=step, atol=step)
    torch.testing.assert_close(actual.logsumexp, expected.logsumexp, rtol=step, atol=step)
    logits = torch.nn.functional.linear(hidden, weights).float()
    torch.testing.assert_close(logits.gather(1, actual.token_ids), actual.values, rtol=step, atol=step)


@pytest.mark.parametrize("k", [1, 3])
def test_ties_go_to_the_lowest_id(k: int) -> None:
    hidden, weights = torch.ones(2, 16, device=DEVICE), torch.zeros(200, 16, device=DEVICE)
    hidden[1] = -1
    weights[[70, 130, 199], 0] = 1.0
    weights[5] = -0.0
    expected = [[70, 130, 199], [0, 1, 2]]
    assert unembed_topk(hidden, weights, k, 0, 200).token_ids.tolist() == [ids[:k] for ids in expected]


@pytest.mark.parametrize("k", [1, 3])
def test_infinities_and_nan(k: int) -> None:
    hidden = torch.ones(6, 1, device=DEVICE)
    weights = integers(150, 1, dtype=torch.float32)
    hidden[1], hidden[2], hidden[5] = float("nan"), float("inf"), 0.0
    bias = torch.zeros(150, device=DEVICE)
    bias[[7, 80]] = float("-inf")
    with_bias = lowest_ids(hidden, weights, k, 0, 150, bias=bias)
    same(unembed_topk(hidden, weights, k, 0, 150, bias=bias), with_bias)
    nothing = torch.full((150,), float("-inf"), device=DEVICE)
    same(
        unembed_topk(hidden[:1], weights, k, 0, 150, bias=nothing),
        lowest_ids(hidden[:1], weights, k, 0, 150, bias=nothing),
    )
    assert with_bias.values[1].isnan().all()


def test_bias_and_no_logsumexp() -> None:
    hidden, weights = integers(3, 40, dtype=torch.bfloat16), integers(90, 40, dtype=torch.bfloat16)
    options = {"bias": integers(90, dtype=torch.bfloat16, most=9), "with_logsumexp": False}
    actual = unembed_topk(hidden, weights, 2, 0, 90, **options)  # type: ignore[arg-type]
    expected = lowest_ids(hidden, weights, 2, 0, 90, **options)
    same(actual._replace(logsumexp=expected.logsumexp), expected)  # its own is anything


def test_what_the_reference_takes_over() -> None:
    weights = integers(33, 24, dtype=torch.float32)
    for rows, k in ((65, 2), (2, 9)):
        hidden = integers(rows, 24, dtype=torch.float32)
        actual, expected = (kernel(hidden, weights, k, 0, 33) for kernel in (unembed_topk, reference))
        assert torch.equal(actual.values, expected.values)
    with pytest.raises(ValueError, match=r"k=34 is outside 1\.\.33"):
        unembed_topk(weights, weights, 34, 0, 33)
