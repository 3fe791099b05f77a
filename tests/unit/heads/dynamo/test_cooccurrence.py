# SPDX-License-Identifier: Apache-2.0
"""Co-occurrence counts are those of a Counter, their mask is eq. 3, and both are bounded."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from heads_folders import corpus
from safetensors.torch import load_file, save_file

from vllm_ppd.heads.dynamo import cooccurrence, counts
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.counts import check_counts
from vllm_ppd.kernels.joint import mask

VOCAB = 7


@pytest.mark.parametrize("order", [2, 3])
def test_counts_are_those_of_a_counter(order: int) -> None:
    documents = corpus()
    counted = CoOccurrence.from_tokens(documents, VOCAB, order)
    for n in range(2, order + 1):
        grams = Counter(
            tuple(d[i : i + n].tolist())
            for d in documents
            for i in range(len(d) - n + 1)
        )
        keys = {
            sum(token * VOCAB ** (n - 1 - i) for i, token in enumerate(gram)): c
            for gram, c in grams.items()
        }
        assert (
            dict(zip(counted.keys[n].tolist(), counted.counts[n].tolist(), strict=True))
            == keys
        )
        assert int(counted.totals[n - 1]) == sum(grams.values())
    assert counted.unigram.tolist() == [
        sum(int((d == t).sum()) for d in documents) for t in range(VOCAB)
    ]


def test_mask_is_the_ratio_of_eq_3() -> None:
    documents = corpus()
    table = CoOccurrence.from_tokens(documents, VOCAB, 3)
    tokens = [d.tolist() for d in documents]
    single = Counter(t for d in tokens for t in d)
    triples = Counter(tuple(d[i : i + 3]) for d in tokens for i in range(len(d) - 2))
    ids = [
        torch.tensor([[0, 1, 4]]),
        torch.tensor([[2, 4, 0]]),
        torch.tensor([[1, 0, 4]]),
    ]
    counted = mask(ids, table.ngrams)
    for index in itertools.product(range(3), repeat=3):
        gram = tuple(int(ids[i][0, index[i]]) for i in range(3))
        ratio = triples[gram] / sum(triples.values())
        for token in gram:
            ratio /= single[token] / sum(single.values()) if single[token] else 1
        assert float(counted[(0, *index)]) == pytest.approx(ratio, rel=1e-5)
    with pytest.raises(ValueError, match="order 4 were not counted"):
        mask([*ids, ids[0]], table.ngrams)


def test_bounded_counts_keep_the_most_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [np.array([1, 2] * 40), *corpus(3)]
    whole = CoOccurrence.from_tokens(documents, VOCAB, 2)
    bounded = CoOccurrence.from_tokens(documents, VOCAB, 2, max_entries=5)
    best = whole.counts[2].sort(descending=True).values[:5]
    assert torch.equal(bounded.counts[2].sort(descending=True).values, best)
    monkeypatch.setattr(cooccurrence, "FLUSH", 10)
    table = cooccurrence._Table(5)
    largest = 0
    for document in documents * 20:
        table.add(document)
        largest = max(largest, len(table.keys))
    assert largest <= 40


def test_counts_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="not those of the chunks"):
        CoOccurrence.from_tokens([np.array([150_000 - 1] * 9)], 150_000, 4)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        CoOccurrence.from_tokens([np.array([9])], VOCAB, 2)


def test_keys_fit_whatever_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where V^n is too large, n-grams of the most frequent tokens are counted, and
    others have mask 0.
    """
    documents = corpus()
    whole = CoOccurrence.from_tokens(documents, VOCAB, 3)
    ids = [torch.arange(VOCAB)[None]] * 3
    expected = mask(ids, whole.ngrams)[0]
    monkeypatch.setattr(counts, "KEYS", 5**3 + 1)
    bounded = CoOccurrence.from_tokens(
        documents, VOCAB, 3, unigram=whole.unigram.numpy()
    )
    frequent = sorted(whole.unigram.argsort(descending=True, stable=True)[:4].tolist())
    assert bounded.digits.base == 5 and bounded.digits.tokens.tolist() == frequent
    loaded = CoOccurrence.from_tensors(bounded.tensors())
    assert loaded is not None
    check_counts({name: tensor.numpy() for name, tensor in loaded.tensors().items()})
    known = torch.isin(torch.arange(VOCAB), torch.tensor(frequent))
    all_known = known[:, None, None] & known[:, None] & known
    assert torch.equal(mask(ids, loaded.ngrams)[0], expected * all_known)
    assert torch.equal(loaded.totals, whole.totals)
    keys = bounded.tensors() | {"cooccurrence.3.keys": torch.tensor([5**3])}
    with pytest.raises(
        ValueError, match=r"cooccurrence\.3\.keys are not ascending keys"
    ):
        check_counts({name: tensor.numpy() for name, tensor in keys.items()})


@pytest.mark.parametrize("vocab_size", [55_108, 55_109, 128_256, 262_144])
def test_four_tokens_of_large_vocabularies_fit(vocab_size: int) -> None:
    document = np.random.default_rng(0).integers(vocab_size, size=4_000) // 997 * 997
    unigram = np.bincount(document, minlength=vocab_size)
    counted = CoOccurrence.from_tokens([document], vocab_size, 4, unigram=unigram)
    assert counted.digits.base == min(vocab_size, 55_108)
    rows = [
        torch.from_numpy(document[i : len(document) - 3 + i])[:, None] for i in range(4)
    ]
    ratios = mask(rows, counted.ngrams)
    assert ratios.isfinite().all() and (ratios > 0).all()


def test_counts_round_trip(tmp_path: Path) -> None:
    table = CoOccurrence.from_tokens(corpus(), VOCAB, 3)
    save_file(table.tensors(), tmp_path / "c.safetensors")
    loaded = CoOccurrence.from_tensors(load_file(tmp_path / "c.safetensors"))
    assert loaded is not None
    ids = [torch.arange(VOCAB)[None]] * 3
    assert torch.equal(mask(ids, loaded.ngrams), mask(ids, table.ngrams))
    assert CoOccurrence.from_tensors({}) is None


def test_many_occurrences_of_a_token_are_counted_as_the_most() -> None:
    """Where they do not fit 31 bits, they became negative."""
    table = CoOccurrence(
        torch.tensor([2**33, 1]),
        torch.tensor([2**34, 8]),
        {2: torch.tensor([1])},
        {2: torch.tensor([3])},
    )
    stored = table.tensors()
    assert stored["cooccurrence.unigram"].tolist() == [2**31 - 1, 1]
    check_counts({name: tensor.numpy() for name, tensor in stored.items()})
