# SPDX-License-Identifier: Apache-2.0
"""The end of a draft: Triton against torch, to the bit but for logarithms."""

from __future__ import annotations

import pytest
import torch

from vllm_ppd.kernels.drafts import finish as reference_finish
from vllm_ppd.kernels.drafts import store_q as reference_store
from vllm_ppd.kernels.drafts_triton import finish, store_q

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STAND_IN = 11


def drafts(requests: int, made: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token IDs, some of them INVALID, and request rows, every fourth of padding."""
    generator = torch.Generator().manual_seed(requests + made)
    ids = torch.randint(0, 99, (requests, made), generator=generator)
    ids[torch.rand(requests, made, generator=generator) < 0.2] = -1
    rows = torch.randperm(requests + 2, generator=generator)[:requests]
    rows[3::4] = -1
    return ids.to(DEVICE), rows.to(DEVICE)


@pytest.mark.parametrize("with_counts", [False, True])
@pytest.mark.parametrize("with_confidence", [False, True])
@pytest.mark.parametrize(("requests", "made"), [(1, 1), (5, 3), (300, 4)])
def test_finish(requests: int, made: int, with_counts: bool, with_confidence: bool) -> None:
    ids, rows = drafts(requests, made)
    counts = torch.randint(0, made + 2, (requests,), device=DEVICE) if with_counts else None
    most = torch.randint(0, 2, (requests,), device=DEVICE).float() * 4
    known = torch.rand(requests, made, device=DEVICE)
    written = []
    for call in (reference_finish, finish):
        tokens = torch.full((requests + 2, 4), -7, device=DEVICE)
        out = torch.full((requests + 2, 4), -7.0, device=DEVICE)
        counted = torch.tensor([5, 6], device=DEVICE)
        call(ids, counts, rows, most, STAND_IN, tokens, (known, out) if with_confidence else None, counted)
        written.append((tokens, out, counted))
    for tensor, expected in zip(written[1], written[0], strict=True):
        assert torch.equal(tensor, expected)
    assert (written[0][0][:requests, :made] >= 0).all()
    if requests > 200:
        assert (written[0][2] > torch.tensor([5, 6 if with_counts else 5], device=DEVICE)).all()


@pytest.mark.parametrize("with_columns", [False, True])
@pytest.mark.parametrize("as_logits", [False, True])
def test_store_q(as_logits: bool, with_columns: bool) -> None:
    requests, made, vocabulary = 5, 3, 2500
    entries = 2100 if with_columns else vocabulary
    ids, rows = drafts(requests, made)
    q = torch.softmax(torch.randn(requests, made, entries, device=DEVICE) * 3, dim=-1)
    q[0, 0, :5] = 0.0
    columns = torch.randperm(vocabulary, device=DEVICE)[:entries] if with_columns else None
    stand_in = STAND_IN if columns is None else int(columns[STAND_IN])
    heat = torch.tensor([0.0, 0.5, 1.0, 0.0, 0.7], device=DEVICE)  # the fourth drafts greedily, at any temperature
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.7], device=DEVICE) if as_logits else None
    stores = []
    for call in (reference_store, store_q):
        store = torch.full((requests + 3, made + 1, vocabulary), -7.0, device=DEVICE)
        call(q, ids, rows, heat, temperature, columns, stand_in, store)
        stores.append(store[:-1])  # the last row is padding's
    torch.testing.assert_close(stores[1], stores[0], rtol=1e-6, atol=1e-6)
    request, draft = (int(places[0]) for places in ((ids < 0) & (rows >= 0)[:, None]).nonzero(as_tuple=True))
    written = stores[0][rows[request], draft] if columns is None else stores[0][rows[request], draft, columns]
    assert int((written == (0.0 if as_logits else 1.0)).sum()) == 1  # one-hot
