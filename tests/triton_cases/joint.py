# SPDX-License-Identifier: Apache-2.0
"""DynaMo's joint, back-off and draws: Triton against torch."""

import numpy as np
import pytest
import torch
from interpreter import DEVICE, seeded

from vllm_ppd.heads.dynamo import cooccurrence
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.kernels import joint as reference
from vllm_ppd.kernels.joint import Likeliest, Ngrams, Top, peaks_of
from vllm_ppd.kernels.joint_triton import back_off, draw_ngrams, find_peaks

torch.set_default_device(DEVICE)
VOCAB = 300
ROWS = 6
DOCUMENT = np.random.default_rng(0).integers(VOCAB, size=30_000)
EPS_B = torch.tensor(
    [
        0.0,
        1e-3,
        0.05,
        0.3,
        1.0,
        0.1,
    ]
)


def ngrams(orders: int, document: np.ndarray = DOCUMENT) -> Ngrams:
    counts = np.bincount(document, minlength=VOCAB)
    with torch.device("cpu"):
        table = CoOccurrence.from_tokens(
            [document], counts, orders, 1 << 20
        ).ngrams
    return table.to(DEVICE)


def candidates(heads: int, k: int, given: bool, learned: bool = False) -> Top:
    torch.manual_seed(heads * k)
    scores, ids = (3 * torch.randn(heads, ROWS, VOCAB)).topk(k)
    first = torch.randint(VOCAB, (ROWS,)) if given else None
    pairs = torch.randn(heads - 1, ROWS, k, k) if learned else None
    return Top(scores, ids, first, pairs)


def same(
    top: Top, table: Ngrams | None, eps_b: torch.Tensor = EPS_B
) -> Likeliest:
    """The kernels' choice, equal to the reference's."""
    peaks, joints = find_peaks(top, table)
    expected, expected_joints = reference.find_peaks(top, table)
    torch.testing.assert_close(
        [peaks.sums.sum(-1), *joints],
        [expected.sums.sum(-1), *expected_joints],
        equal_nan=True,
    )
    chosen = back_off(
        peaks,
        top,
        eps_b,
    )
    wanted = reference.back_off(
        expected,
        top,
        eps_b,
    )
    torch.testing.assert_close(tuple(chosen), tuple(wanted), equal_nan=True)
    return chosen


@pytest.mark.parametrize(
    ("heads", "k", "given", "masked"),
    [
        pytest.param(1, 50, True, True, marks=pytest.mark.full),
        pytest.param(2, 50, True, True, marks=pytest.mark.full),
        (2, 9, False, False),
        (2, 1, True, True),
        (3, 7, False, True),
    ],
)
def test_is_the_reference(heads: int, k: int, given: bool, masked: bool) -> None:
    table = ngrams(max(2, heads + given)) if masked else None
    for learned in (False, True):
        top = candidates(heads, k, given, learned)
        chosen = same(top, table)
        assert chosen.order[4] == 1
        assert k == 1 or table is not None or chosen.order[0] == heads + given


@pytest.mark.parametrize(
    "given", [True, pytest.param(False, marks=pytest.mark.full)]
)
def test_is_the_reference_where_keys_are_of_frequent_tokens(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cooccurrence, "KEYS", 100**3 + 1)
    document = DOCUMENT**2 // VOCAB  # some tokens are frequent
    table = ngrams(3, document)
    assert table.base == 100 and table.columns is not None
    same(candidates(2, 50, given), table)


@pytest.mark.parametrize("damaged", [torch.nan, torch.inf])
def test_a_joint_that_is_not_finite_drafts_one_invalid_token(
    damaged: float,
) -> None:
    top = candidates(2, 10, True)
    top.scores[1, 0, 0] = top.scores[0, 2] = damaged
    chosen = same(
        top,
        ngrams(3),
        eps_b=torch.zeros(ROWS),
    )
    assert chosen.order[[0, 2]].tolist() == [1, 1]
    assert chosen.tokens[[0, 2], 1:].eq(-1).all()


def test_the_first_and_the_last_counted_n_gram_are_seen() -> None:
    ends = torch.tensor([0, VOCAB - 1] * ROWS)
    ids = ends.view(1, ROWS, 2)
    top = Top(torch.zeros(1, ROWS, 2), ids, ends[:ROWS].clone())
    document = np.array([0, 0, VOCAB - 1, VOCAB - 1])
    table = ngrams(2, document)
    chosen = same(top, table)
    assert chosen.tokens[:2].tolist() == [[0, 0], [VOCAB - 1, VOCAB - 1]]
    with_joints, _ = find_peaks(top, table)
    peaks, joints = find_peaks(top, table, with_joints=False)
    torch.testing.assert_close(tuple(peaks), tuple(with_joints))
    assert joints == []


def drawn_from(
    heads: int, k: int, given: bool
) -> tuple[list[torch.Tensor], Likeliest, Top]:
    """Joints as of a model, few entries large and many small; rows of every order, one
    of them all zero.
    """
    top = candidates(heads, k, given)
    _, products = reference.find_peaks(top, None)
    joints = [product * torch.rand_like(product) for product in products]
    joints[-1][-1] = 0
    return (
        joints,
        reference.back_off(
            peaks_of(joints),
            top,
            EPS_B,
        ),
        top,
    )


@pytest.mark.parametrize(
    ("heads", "k", "given", "greedy"),
    [
        (2, 40, True, True),
        (2, 20, False, False),
        (3, 9, True, False),
        (2, 1, True, False),
    ],
)
def test_draws_are_the_references(
    heads: int, k: int, given: bool, greedy: bool
) -> None:
    """The same draws with the same random numbers, and the likeliest n-gram of greedy rows."""
    sampling = seeded([0.0 if greedy else 1.0] * ROWS)
    arguments = *drawn_from(heads, k, given), sampling
    assert torch.equal(draw_ngrams(*arguments), reference.draw_ngrams(*arguments))


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(([3], [1.0]), marks=pytest.mark.full),
        pytest.param(([999], [0.6]), marks=pytest.mark.full),
        ([5], [0.8]),
    ],
)
def test_top_k_and_top_p_are_the_references(
    limits: tuple[list[float], ...],
) -> None:
    joints, likeliest, top = drawn_from(2, 40, True)
    joints[1][3, 0, 1:] = joints[1][3, 0, 1]  # entries that tie
    top_k, top_p = limits
    sampling = seeded([1.0] * ROWS, top_k * ROWS, top_p * ROWS)
    for position in range(2):
        arguments = joints, likeliest, top, sampling.ahead(position)
        assert torch.equal(
            draw_ngrams(*arguments), reference.draw_ngrams(*arguments)
        )
