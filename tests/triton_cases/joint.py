# SPDX-License-Identifier: Apache-2.0
"""DynaMo's joint, back-off and draws: Triton against torch."""

import numpy as np
import pytest
import torch

from vllm_ppd.heads.dynamo import cooccurrence
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.kernels import joint as reference
from vllm_ppd.kernels.joint import Likeliest, Ngrams, Top, peaks_of
from vllm_ppd.kernels.joint_triton import back_off, draw_ngrams, find_peaks
from vllm_ppd.kernels.sampling import Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 300
ROWS = 5
DOCUMENT = np.random.default_rng(0).integers(VOCAB, size=30_000)


def ngrams(orders: int, document: np.ndarray = DOCUMENT) -> Ngrams:
    return CoOccurrence.from_tokens([document], VOCAB, orders).ngrams.to(DEVICE)


def candidates(heads: int, k: int, given: bool) -> Top:
    generator = torch.Generator().manual_seed(k)
    scores, ids = (3 * torch.randn(heads, ROWS, VOCAB, generator=generator)).topk(k)
    first = (
        torch.randint(VOCAB, (ROWS,), generator=generator).to(DEVICE) if given else None
    )
    return Top(scores.to(DEVICE), ids.to(DEVICE), first)


def same(
    top: Top, table: Ngrams | None, alpha_c: float, eps_b: torch.Tensor | None = None
) -> reference.Likeliest:
    """The kernels' choice, equal to the reference's."""
    peaks, joints = find_peaks(top, table, alpha_c)
    expected, expected_joints = reference.find_peaks(top, table, alpha_c)
    torch.testing.assert_close(
        peaks.sums.sum(-1), expected.sums.sum(-1), equal_nan=True
    )
    torch.testing.assert_close(joints, expected_joints, equal_nan=True)
    without, nothing = find_peaks(top, table, alpha_c, with_joints=False)
    torch.testing.assert_close(
        (tuple(without), nothing), (tuple(peaks), []), equal_nan=True
    )
    eps_b = (
        torch.tensor([0.0, 0.05, 0.3, 1.0, torch.nan], device=DEVICE)
        if eps_b is None
        else eps_b
    )
    chosen = back_off(peaks, top, eps_b, 0.1)
    wanted = reference.back_off(expected, top, eps_b, 0.1)
    assert all(
        torch.equal(*parts) for parts in zip(chosen[:4], wanted[:4], strict=True)
    )
    torch.testing.assert_close(tuple(chosen[4:]), tuple(wanted[4:]), equal_nan=True)
    return chosen


@pytest.mark.parametrize(
    ("heads", "k", "given", "alpha_c"),
    [
        (1, 50, True, 1.0),
        (2, 50, True, 1.0),
        (2, 50, False, None),
        (2, 1, True, 0.5),
        (3, 20, True, 0.5),
        (3, 7, False, 1.0),
        (2, 7, False, 0.5),
    ],
)
def test_is_the_reference(
    heads: int, k: int, given: bool, alpha_c: float | None
) -> None:
    table = None if alpha_c is None else ngrams(max(2, heads + given))
    chosen = same(candidates(heads, k, given), table, alpha_c or 0.0)
    assert chosen.order[3] == 1
    assert k == 1 or table is not None or chosen.order[0] == heads + given


@pytest.mark.parametrize("given", [True, False])
def test_is_the_reference_where_keys_are_of_frequent_tokens(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cooccurrence, "KEYS", 100**3 + 1)
    document = DOCUMENT**2 // VOCAB  # some tokens are frequent
    unigram = np.bincount(document, minlength=VOCAB)
    table = CoOccurrence.from_tokens([document], VOCAB, 3, unigram=unigram).ngrams.to(
        DEVICE
    )
    assert table.base == 100 and table.columns is not None
    same(candidates(2, 50, given), table, 1.0)


@pytest.mark.parametrize("damaged", [torch.nan, torch.inf])
def test_a_joint_that_is_not_finite_drafts_one_invalid_token(damaged: float) -> None:
    top = candidates(2, 10, True)
    top.scores[1, 0, 0] = top.scores[0, 2] = damaged
    chosen = same(top, ngrams(3), 1.0, eps_b=torch.zeros(ROWS, device=DEVICE))
    assert chosen.order[[0, 2]].tolist() == [1, 1]
    assert chosen.tokens[[0, 2], 1:].eq(-1).all()


def test_the_first_and_the_last_counted_n_gram_are_seen() -> None:
    ends = torch.tensor([0, VOCAB - 1] * ROWS, device=DEVICE)
    top = Top(
        torch.zeros(1, ROWS, 2, device=DEVICE),
        ends.view(1, ROWS, 2),
        ends[:ROWS].clone(),
    )
    chosen = same(top, ngrams(2, np.array([0, 0, VOCAB - 1, VOCAB - 1])), 1.0)
    assert chosen.tokens[:2].tolist() == [[0, 0], [VOCAB - 1, VOCAB - 1]]


def drawn_from(
    heads: int, k: int, given: bool, rows: int = 6
) -> tuple[list[torch.Tensor], Likeliest, Top]:
    """Joints as of a model, few entries large and many small; rows of every order, one
    of them all zero.
    """
    generator = torch.Generator().manual_seed(heads * k)
    top = (3 * torch.randn(heads, rows, VOCAB, generator=generator)).topk(k)
    first = (
        torch.randint(VOCAB, (rows,), generator=generator).to(DEVICE) if given else None
    )
    joints = []
    product = torch.ones(rows)
    for order, head in enumerate(
        [*([torch.zeros(rows, 1)] if given else []), *top.values], start=1
    ):
        product = product.unsqueeze(-1) * head.softmax(-1).view(
            rows, *[1] * (order - 1), -1
        )
        joints.append(
            (product * torch.rand(product.shape, generator=generator)).to(DEVICE)
        )
    joints[-1][-1] = 0
    candidates = Top(top.values.to(DEVICE), top.indices.to(DEVICE), first)
    eps_b = torch.tensor([0.0, 1e-3, 0.05, 0.2, 1.0, 0.0], device=DEVICE)[:rows]
    return (
        joints,
        reference.back_off(peaks_of(joints), candidates, eps_b, 0.5),
        candidates,
    )


@pytest.mark.parametrize(
    ("heads", "k", "given", "blur", "adaptive", "seeded"),
    [
        (1, 50, True, 3, True, True),
        (2, 40, True, 3, True, True),
        (2, 40, True, 3, True, False),
        (2, 20, False, 1, True, True),
        (2, 20, False, 3, False, True),
        (3, 9, True, 3, True, True),
        (3, 9, True, 3, False, False),
        (2, 1, True, 3, True, True),
        (2, 20, True, 5, True, True),
        (4, 3, False, 3, True, True),
    ],
)
def test_draws_are_the_references(
    heads: int, k: int, given: bool, blur: int, adaptive: bool, seeded: bool
) -> None:
    """The same draws with the same random numbers; without them, those of rows that
    take the likeliest n-gram.
    """
    numbers = torch.arange(6, device=DEVICE) + (1 << 40)
    sampling = Sampling(torch.ones(6, device=DEVICE), None, None, numbers, numbers)
    if not seeded:
        sampling = Sampling(torch.zeros(6, device=DEVICE))
    arguments = *drawn_from(heads, k, given), blur, adaptive, sampling
    assert torch.equal(draw_ngrams(*arguments), reference.draw_ngrams(*arguments))


@pytest.mark.parametrize(
    "limits", [{"top_k": 3.0}, {"top_p": 0.6}, {"top_k": 5.0, "top_p": 0.8}]
)
def test_top_k_and_top_p_are_the_references(limits: dict[str, float]) -> None:
    joints, likeliest, top = drawn_from(2, 40, True)
    joints[1][3, 0, 1:] = joints[1][3, 0, 1]  # entries that tie
    limited = {
        name: torch.full((6,), value, device=DEVICE) for name, value in limits.items()
    }
    for seed in range(4):
        numbers = torch.arange(6, device=DEVICE) + 1000 * seed
        sampling = Sampling(
            torch.ones(6, device=DEVICE), **limited, seeds=numbers, positions=numbers
        )
        arguments = joints, likeliest, top, 1, False, sampling
        assert torch.equal(draw_ngrams(*arguments), reference.draw_ngrams(*arguments))
