# SPDX-License-Identifier: Apache-2.0
"""DynaMo's choice of an n-gram against a direct, slow transcription of Algorithm 1 and
its equations.
"""

import math

import numpy as np
import pytest
import torch
from heads_folders import corpus, counted, sampling_at
from scipy.ndimage import gaussian_filter

from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.joint import JointChoice, candidates
from vllm_ppd.heads.dynamo.mask import LearnedMask
from vllm_ppd.kernels.joint import mask

VOCAB = 7


def select(
    scores: list[torch.Tensor],
    k: int,
    counts: CoOccurrence | None = None,
    first_token: torch.Tensor | None = None,
    eps_b: float = 0.5,
) -> JointChoice:
    joint = candidates(
        torch.stack(scores),
        k,
        counts and counts.ngrams,
        first_token,
    )
    return joint.back_off(torch.full((len(scores[0]),), eps_b))


def log_probs(
    rows: int,
    n: int,
    sharp: float = 2.0,
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = sharp * torch.randn(
        n,
        rows,
        VOCAB,
        generator=generator,
    )
    return list(scores.log_softmax(-1))


def slow_otsu(values: np.ndarray, bins: int = 256) -> float:
    """Every cut tried, variances from the members of the classes."""
    low = values.min()
    width = values.max() - low
    if not width:
        return float(low)
    index = np.minimum(((values - low) / width * bins).astype(int), bins - 1)
    best = -1.0
    threshold = low
    for cut in range(1, bins):
        below = index[index < cut]
        above = index[index >= cut]
        if len(below) and len(above):
            between = len(below) * len(above) * (below.mean() - above.mean()) ** 2
            if between > best * (1 + 1e-12):
                best = between
                threshold = low + width * cut / bins
    return float(threshold)


def slow_choice(
    heads: list[torch.Tensor],
    k: int,
    eps_b: float,
    counts: CoOccurrence | None,
    row: int,
) -> tuple[int, np.ndarray]:
    """Algorithm 1 with loops: the order, and the joint over the heads' top-k (empty of order 1)."""
    for n in range(len(heads), 1, -1):
        tops = [head[row].double().exp().topk(k) for head in heads[:n]]
        shares = [(top.values / top.values.sum()).numpy() for top in tops]
        tokens = [top.indices for top in tops]
        entries = np.ones([k] * n)
        for index in np.ndindex(entries.shape):
            gram = [
                ids[i : i + 1][None] for ids, i in zip(tokens, index, strict=True)
            ]
            entries[index] = math.prod(
                p[i] for p, i in zip(shares, index, strict=True)
            )
            if counts is not None:
                entries[index] *= float(mask(gram, counts.ngrams))
        entries /= entries.sum() or 1
        floor = eps_b ** (n - 1)
        entries[entries < floor] = 0
        blurred = gaussian_filter(
            entries,
            0.8,
            mode="nearest",
            radius=1,
        )
        below = blurred < slow_otsu(blurred.ravel())
        entries[below & (entries < entries.max())] = 0
        if entries.max() > floor:
            return n, entries
    return 1, np.zeros(0)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("eps_b", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_choice_is_algorithm_1(
    n: int,
    eps_b: float,
    masked: bool,
) -> None:
    """Every entry of the joint of the order that is taken, and the likeliest n-gram."""
    rows = 20 if n < 4 else 4
    heads = log_probs(rows, n)
    counts = counted(corpus(), n) if masked else None
    choice = select(heads, 4, counts, eps_b=eps_b)
    best = choice.likeliest.tokens
    for row in range(rows):
        order, entries = slow_choice(
            heads,
            4,
            eps_b,
            counts,
            row,
        )
        assert int(choice.order[row]) == order
        assert (best[row, order:] == -1).all()
        if order == 1:
            continue
        joint = choice.joints[order - 1][row].numpy()
        np.testing.assert_allclose(
            joint,
            entries,
            rtol=1e-4,
            atol=1e-7,
        )
        taken = []
        for ids, token in zip(
            choice.top.token_ids, best[row, :order], strict=False
        ):
            taken.append(ids[row].tolist().index(token))
        assert entries[tuple(taken)] == pytest.approx(entries.max(), rel=1e-4)


def test_eps_b_of_each_row() -> None:
    heads = [head.repeat(2, 1) for head in log_probs(1, 3)]
    choice = candidates(torch.stack(heads), 4).back_off(torch.tensor([0.0, 1.0]))
    assert choice.order.tolist() == [3, 1]


def test_conditioning_is_the_joint_given_the_first_token() -> None:
    heads = log_probs(VOCAB, 3)
    counts = counted(corpus(), 3)
    given = select(
        heads[1:],
        VOCAB,
        counts,
        first_token=torch.arange(VOCAB),
    )
    whole = select(heads, VOCAB, counts)
    for first in range(VOCAB):
        at = whole.top.token_ids[0][first].tolist().index(first)
        expected = whole.uncut[2][first, at]
        actual = given.uncut[2][first, 0]
        share = actual.sum() / expected.sum().clamp(min=1e-30)
        torch.testing.assert_close(actual, expected * share)


def test_drawn_tokens_follow_the_probabilities_given_those_before() -> None:
    torch.manual_seed(0)
    draws = 20_000
    heads = [head.expand(draws, -1) for head in log_probs(1, 2, sharp=0.3)]
    choice = select(
        heads,
        5,
        first_token=torch.full((draws,), 5),
        eps_b=0.0,
    )
    tokens = choice.draw(sampling_at(torch.ones(draws)))
    assert (tokens[:, 0] == 5).all()
    joint = choice.joints[2][0, 0]
    claimed = choice.probabilities(tokens).prod(dim=1)
    for place in np.ndindex(5, 5):
        ids = [choice.top.token_ids[1 + i][0, at] for i, at in enumerate(place)]
        rows = (tokens[:, 1:] == torch.stack(ids)).all(dim=1)
        share = float(joint[place] / joint.sum())
        assert float(rows.float().mean()) == pytest.approx(share, abs=0.015)
        assert claimed[rows].tolist() == pytest.approx([share] * int(rows.sum()))
    assert 5 < (joint > 0).sum() < 25, "thresholds cut some"
    outside = tokens.clone()
    outside[:, 1] = VOCAB  # no head's candidate
    assert not choice.probabilities(outside).any()


def test_a_learned_mask_makes_conditionals() -> None:
    """The joint is p(x) p(y | x), each over the temperature, and no longer the product."""
    generator = torch.Generator().manual_seed(0)
    rows, rank, size = 3, 2, 4
    embeddings = torch.randn(VOCAB, size, generator=generator)
    lm_head = torch.randn(VOCAB, size, generator=generator)
    tensors = {
        "mask.newest": torch.randn(
            2,
            size,
            size,
            generator=generator,
        ),
        "mask.before": torch.randn(
            1,
            rank,
            size,
            generator=generator,
        ),
        "mask.after": torch.randn(
            1,
            rank,
            size,
            generator=generator,
        ),
    }
    mask = LearnedMask(tensors)
    ids = torch.arange(VOCAB)
    tables = mask.tables(
        ids, embeddings.__getitem__, lambda states: states @ lm_head.T + 0.5
    )
    first = torch.tensor([2, 0, 5])
    heat = torch.tensor([[0.5], [1.0], [2.0]])
    states = torch.randn(
        2,
        rows,
        size,
        generator=generator,
    )
    newest = embeddings[first][:, None]
    read = [s + mask(token, newest) for token, s in enumerate(states, start=2)]
    joint = candidates(
        torch.stack([state @ lm_head.T for state in read]),
        VOCAB,
        first_token=first,
        tables=tables,
        heat=heat,
    )
    for row in range(rows):
        one = (read[0][row] @ lm_head.T / heat[row]).softmax(-1)
        both = torch.stack([newest.expand(-1, VOCAB, -1)[row], embeddings], 1)
        after = states[1, row] + mask(3, both)
        two = (after @ lm_head.T / heat[row]).softmax(-1)
        x, y = joint.top.ids[:, row]
        expected = (one[:, None] * two)[x[:, None], y]
        torch.testing.assert_close(joint.uncut[2][row, 0], expected)
