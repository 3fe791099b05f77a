# SPDX-License-Identifier: Apache-2.0
"""Co-occurrence counts are those of a Counter, their mask is eq. 3, and both are bounded."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from heads_folders import corpus, counted
from safetensors.torch import load_file, save_file

from vllm_ppd.heads.dynamo import cooccurrence
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.kernels.joint import mask

VOCAB = 7
EVERY = torch.arange(VOCAB)[None]


def grams(documents: list[np.ndarray], n: int) -> Counter[tuple[int, ...]]:
    """How often each n-gram occurs."""
    counter: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        tokens = document.tolist()
        counter.update(zip(*(tokens[i:] for i in range(n)), strict=False))
    return counter


@pytest.mark.parametrize("order", [2, 3])
def test_mask_is_the_ratio_of_eq_3(order: int) -> None:
    documents = corpus()
    table = counted(documents, order)
    single = grams(documents, 1)
    several = grams(documents, order)
    ratios = mask([EVERY] * order, table.ngrams)[0]
    for gram in itertools.product(range(VOCAB), repeat=order):
        ratio = several[gram] / several.total()
        for token in gram:
            ratio /= single[(token,)] / single.total() or 1
        assert float(ratios[gram]) == pytest.approx(ratio, rel=1e-5)


def test_bounded_counts_keep_the_most_frequent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = [np.array([1, 2] * 40), *corpus(3)]
    whole = counted(documents, 2)
    bounded = counted(documents, 2, max_entries=5)
    assert sorted(bounded.counts[2]) == sorted(whole.counts[2])[-5:]
    monkeypatch.setattr(cooccurrence, "FLUSH", 10)
    table = cooccurrence._Table(5)
    for document in documents * 20:
        table.add(document)
        assert len(table.keys) <= 40


def test_keys_fit_whatever_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where V^n is too large, n-grams of the most frequent tokens are counted, and
    others have mask 0; also after a round trip.
    """
    documents = corpus()
    whole = counted(documents, 3)
    expected = mask([EVERY] * 3, whole.ngrams)[0]
    monkeypatch.setattr(cooccurrence, "KEYS", 5**3 + 1)
    bounded = counted(documents, 3)
    frequent = sorted(np.argsort(-whole.unigram, kind="stable")[:4].tolist())
    assert bounded.digits.base == 5 and bounded.digits.tokens.tolist() == frequent
    save_file(bounded.tensors(), tmp_path / "c.safetensors")
    loaded = CoOccurrence.from_tensors(load_file(tmp_path / "c.safetensors"))
    assert loaded is not None
    known = torch.isin(EVERY[0], torch.tensor(frequent))
    all_known = known[:, None, None] & known[:, None] & known
    assert torch.equal(mask([EVERY] * 3, loaded.ngrams)[0], expected * all_known)


@pytest.mark.parametrize("vocab_size", [55_108, 55_109, 262_144])
def test_four_tokens_of_large_vocabularies_fit(vocab_size: int) -> None:
    document = (
        np.random.default_rng(0).integers(vocab_size, size=4_000) // 997 * 997
    )
    table = counted([document], 4, vocab_size)
    assert table.digits.base == min(vocab_size, 55_108)
    tokens = torch.from_numpy(document)
    rows = [tokens[i : len(document) - 3 + i, None] for i in range(4)]
    ratios = mask(rows, table.ngrams)
    assert ratios.isfinite().all() and (ratios > 0).all()


def test_many_occurrences_of_a_token_are_counted_as_the_most() -> None:
    """Where they do not fit 31 bits, they became negative."""
    keys = {2: np.array([1])}
    counts = {2: np.array([3])}
    table = CoOccurrence(
        np.array([2**33, 1]),
        np.array([2**34, 8]),
        keys,
        counts,
    )
    stored = table.tensors()
    assert stored["cooccurrence.unigram"].tolist() == [2**31 - 1, 1]
