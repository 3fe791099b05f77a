# SPDX-License-Identifier: Apache-2.0
"""DynaMo's choice of an n-gram against a direct, slow transcription of Algorithm 1 and
its equations.
"""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from heads_folders import corpus

from vllm_ppd.heads.dynamo.config import JointSettings
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.joint import JointChoice, candidates
from vllm_ppd.kernels import joint as kernels
from vllm_ppd.kernels.joint import mask
from vllm_ppd.kernels.sampling import Sampling

VOCAB = 7


def select(
    scores: list[torch.Tensor],
    settings: JointSettings,
    counts: CoOccurrence | None = None,
    **given: torch.Tensor,
) -> JointChoice:
    joint = candidates(
        scores, settings, counts and counts.ngrams, given.pop("first_token", None)
    )
    return joint.back_off(settings, **given)  # type: ignore[arg-type]


def log_probs(
    rows: int, n: int, seed: int = 0, vocab: int = VOCAB, sharp: float = 2.0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.log_softmax(sharp * torch.randn(rows, vocab, generator=generator), -1)
        for _ in range(n)
    ]


def slow_blur(values: np.ndarray, size: int) -> np.ndarray:
    """Convolution with the outer product of Gaussians, index by index."""
    half = size // 2
    axes = values.ndim
    sigma = 0.3 * ((size - 1) * 0.5 - 1) + 0.8
    line = np.array(
        [math.exp(-(o**2) / (2 * sigma**2)) for o in range(-half, half + 1)]
    )
    line /= line.sum()
    result = np.zeros_like(values)
    for index in np.ndindex(values.shape):
        for offset in itertools.product(range(-half, half + 1), repeat=axes):
            at = tuple(
                min(max(i + o, 0), s - 1)
                for i, o, s in zip(index, offset, values.shape, strict=True)
            )
            result[index] += values[at] * math.prod(line[o + half] for o in offset)
    return result


def slow_otsu(values: list[float], bins: int) -> float:
    """Every cut tried, variances from the members of the classes."""
    low = min(values)
    high = max(values)
    index = [min(int((v - low) / (high - low) * bins), bins - 1) for v in values]
    best = -1.0
    threshold = low
    for cut in range(1, bins):
        below = [i for i in index if i < cut]
        above = [i for i in index if i >= cut]
        if below and above:
            gap = sum(below) / len(below) - sum(above) / len(above)
            if len(below) * len(above) * gap**2 > best * (1 + 1e-12):
                best = len(below) * len(above) * gap**2
                threshold = low + (high - low) * cut / bins
    return threshold


def slow_choice(
    heads: list[torch.Tensor],
    settings: JointSettings,
    counts: CoOccurrence | None,
    row: int,
) -> tuple[int, np.ndarray]:
    """Algorithm 1 with loops: the order, and the joint over the heads' top-k (empty of order 1)."""
    for n in range(len(heads), 1, -1):
        tops = [
            head[row].double().exp().topk(min(settings.k, VOCAB)) for head in heads[:n]
        ]
        entries = np.ones([len(top.values) for top in tops])
        grams = {}
        for index in np.ndindex(entries.shape):
            of_heads = list(zip(tops, index, strict=True))
            grams[index] = gram = [int(top.indices[i]) for top, i in of_heads]
            entries[index] = math.prod(
                float(top.values[i] / top.values.sum()) for top, i in of_heads
            )
            if counts is not None:
                entries[index] *= (
                    float(
                        mask([torch.tensor([[token]]) for token in gram], counts.ngrams)
                    )
                    ** settings.alpha_c
                )
        entries /= entries.sum() or 1
        floor = settings.eps_b ** (n - 1)
        entries[entries < floor] = 0
        if settings.adaptive:
            blurred = slow_blur(entries, settings.blur)
            threshold = (
                slow_otsu(blurred.ravel().tolist(), 256)
                if blurred.max() > blurred.min()
                else blurred.min()
            )
            entries[(blurred < threshold) & (entries < entries.max())] = 0
        for index, gram in grams.items():
            if len(set(gram)) < n:
                entries[index] /= settings.repetition_penalty
        if entries.max() > floor:
            return n, entries
    return 1, np.zeros(0)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {"eps_b": 0.0},
        {"eps_b": 0.1, "blur": 5},
        {"eps_b": 0.3, "blur": 1},
        {"eps_b": 0.1, "adaptive": False},
        {"eps_b": 1.0},
    ],
)
@pytest.mark.parametrize("alpha_c", [0.0, 0.5, 1.0])
def test_choice_is_algorithm_1(n: int, changes: dict[str, Any], alpha_c: float) -> None:
    """Every entry of the joint of the order that is taken, and the likeliest n-gram."""
    rows = 20 if n < 4 else 4
    heads = log_probs(rows, n)
    eps_b = changes["eps_b"]
    counts = CoOccurrence.from_tokens(corpus(), VOCAB, n) if alpha_c else None
    settings = JointSettings(k=4, repetition_penalty=1.5, alpha_c=alpha_c, **changes)
    choice = select(heads, settings, counts)
    best = choice.likeliest.tokens
    for row in range(rows):
        order, entries = slow_choice(heads, settings, counts, row)
        assert int(choice.order[row]) == order
        assert (best[row, order:] == -1).all()
        if order > 1:
            np.testing.assert_allclose(
                choice.joints[order - 1][row].numpy(), entries, rtol=1e-4, atol=1e-7
            )
            place = tuple(
                int((ids[row] == best[row, i]).int().argmax())
                for i, ids in enumerate(choice.top.token_ids[:order])
            )
            assert entries[place] == pytest.approx(entries.max(), rel=1e-4)
    if eps_b == 1.0:
        assert (choice.order == 1).all()
    if eps_b == 0.0 and not alpha_c:
        assert (choice.order == n).all()


def test_even_blur_is_refused() -> None:
    with pytest.raises(ValueError, match="must be odd"):
        JointSettings(blur=4)


def test_tokens_of_the_context_count_as_repeated() -> None:
    ids = [torch.tensor([[0, 1]]), torch.tensor([[1, 2]]), torch.tensor([[2, 0]])]
    seen = [torch.tensor([[False, i == 1]]) for i in range(3)]
    joint = torch.full((1, 2, 2, 2), 0.125)
    assert (kernels.penalise_repetition(joint, ids, 2.0, seen)[0, :, 1] == 0.0625).all()


def test_everything_masked_backs_off() -> None:
    counts = CoOccurrence.from_tokens([np.array([6, 6, 6])], VOCAB, 2)
    heads = log_probs(6, 2)
    heads[0][:, 6] = -1e4
    assert (select(heads, JointSettings(k=3, eps_b=0.0), counts).order == 1).all()


@pytest.mark.parametrize("eps_b", [0.0, 0.5, 0.6])
def test_peaks_outlive_the_thresholds(eps_b: float) -> None:
    """The choice of n and the likeliest n-gram are taken before the thresholds: after
    them they are the same.
    """
    choice = select(
        log_probs(40, 3),
        JointSettings(k=5, eps_b=eps_b),
        CoOccurrence.from_tokens(corpus(), VOCAB, 3),
    )
    assert len(choice.order.unique()) == (3 if eps_b else 1)
    for m, joint in enumerate(choice.joints, start=1):
        flat = joint.flatten(1)
        rows = choice.order == m
        places = tuple(choice.likeliest.places[rows, :m].unbind(1))
        assert torch.equal(flat.amax(1)[rows], joint[(rows.nonzero()[:, 0], *places)])
        if m > 1:
            assert (flat.amax(1)[rows] > eps_b ** (m - 1)).all()
            assert (
                choice.candidates.joints[m - 1].flatten(1).amax(1)[choice.order < m]
                <= eps_b ** (m - 1)
            ).all()


def test_eps_b_of_each_row() -> None:
    heads = [head.repeat(2, 1) for head in log_probs(1, 3)]
    choice = select(heads, JointSettings(k=4), eps_b=torch.tensor([0.0, 1.0]))
    assert choice.order.tolist() == [3, 1]


def test_samples_follow_the_joint() -> None:
    torch.manual_seed(0)
    heads = [head.expand(20_000, -1) for head in log_probs(1, 2, sharp=1.0)]
    choice = select(heads, JointSettings(k=3, eps_b=0.0, adaptive=False))
    drawn = Counter(
        map(tuple, choice.draw(Sampling.random(torch.ones(20_000))).tolist())
    )
    flat = choice.joints[1][0] / choice.joints[1][0].sum()
    for i, j in itertools.product(range(3), repeat=2):
        gram = (int(choice.top.token_ids[0][0, i]), int(choice.top.token_ids[1][0, j]))
        assert drawn[gram] / 20_000 == pytest.approx(float(flat[i, j]), abs=0.015)


def test_eps_b_one_samples_head_one() -> None:
    """With eps_b = 1 the model samples one token at a time, from head 1's top-k."""
    torch.manual_seed(0)
    heads = [head.expand(20_000, -1) for head in log_probs(1, 2, sharp=1.0)]
    choice = select(heads, JointSettings(k=VOCAB, eps_b=1.0))
    sampled = choice.draw(Sampling.random(torch.ones(20_000)))
    assert (sampled[:, 1] == -1).all()
    share = torch.bincount(sampled[:, 0], minlength=VOCAB) / 20_000
    torch.testing.assert_close(share, heads[0][0].exp(), atol=0.015, rtol=0)


@pytest.mark.parametrize("first", [0, 3, 6])
def test_conditioning_is_the_joint_given_the_first_token(first: int) -> None:
    heads = log_probs(4, 3)
    counts = CoOccurrence.from_tokens(corpus(), VOCAB, 3)
    settings = JointSettings(k=VOCAB, eps_b=0.0, adaptive=False)
    given = select(heads[1:], settings, counts, first_token=torch.full((4,), first))
    whole = select(heads, settings, counts)
    for row in range(4):
        at = whole.top.token_ids[0][row].tolist().index(first)
        conditional = whole.joints[2][row, at]
        if conditional.sum() > 0:
            torch.testing.assert_close(
                given.joints[2][row, 0], conditional / conditional.sum()
            )


def test_drawn_tokens_follow_the_probabilities_given_those_before() -> None:
    torch.manual_seed(0)
    heads = [head.expand(20_000, -1) for head in log_probs(1, 2, sharp=1.0)]
    settings = JointSettings(k=3, eps_b=0.0, adaptive=False)
    choice = select(heads, settings, first_token=torch.full((20_000,), 5))
    temperature = torch.ones(20_000)
    temperature[:10] = 0.0
    tokens = choice.draw(Sampling.random(temperature))
    assert (tokens[:, 0] == 5).all()
    assert torch.equal(tokens[:10], choice.likeliest.tokens[:10])
    claimed = choice.probabilities(tokens).prod(dim=1)
    for ngram in tokens.unique(dim=0):
        rows = (tokens[10:] == ngram).all(dim=1)
        assert float(claimed[10:][rows][0]) == pytest.approx(
            float(rows.float().mean()), abs=0.015
        )
    outside = tokens.clone()
    outside[:, 1] = VOCAB  # no head's candidate
    assert not choice.probabilities(outside).any()
