# SPDX-License-Identifier: Apache-2.0
"""What CP drafting takes on a large GPU, memory beside its weights and time, counted on tensors without values."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from vllm_ppd.kernels.dispatch import SWITCH
from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.vllm_plugins.engine.drafter import DraftInputs
from vllm_ppd.vllm_plugins.methods.cp.drafter import LOGITS_AT_ONCE, CPDrafter

REQUESTS, VOCABULARY, HIDDEN, DRAFTS, RANK = 1024, 128_256, 4096, 3, 3
MIB = 1 << 20
TARGET = 8_030_261_248  # parameters of Llama 3 8B, whose shapes these are
BANDWIDTH, PEAK = 3.35e12, 989e12  # of an H100: bytes and bfloat16 FLOP a second


class Allocated(TorchDispatchMode):
    """Counts the bytes that operations within it allocate, and the most that are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and id(storage := leaf.untyped_storage()) not in given | self.storages:
                self.storages.add(id(storage))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.freed, id(storage), storage.nbytes())
        return out

    def freed(self, storage: int, size: int) -> None:
        self.storages.discard(storage)
        self.now -= size


class Unembedding:
    """A draft vocabulary or a whole LM head of so many tokens."""

    def __init__(self, size: int) -> None:
        self.weight = torch.empty(size, HIDDEN, dtype=torch.bfloat16)
        self.token_ids = torch.arange(size)
        self.place_of = torch.arange(VOCABULARY)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.weight)

    def ids(self, entries: torch.Tensor) -> torch.Tensor:
        return entries


def drafter_of(size: int | None) -> CPDrafter:
    """A drafter of the condition chain, its weights allocated."""
    drafter: Any = CPDrafter()
    matrices = torch.empty(DRAFTS * RANK * HIDDEN, HIDDEN, dtype=torch.bfloat16)
    square = torch.empty(HIDDEN, HIDDEN, dtype=torch.bfloat16)
    drafter.weights = lambda hidden: functional.linear(hidden, matrices)
    drafter.gate = drafter.token_gate = torch.empty(RANK, HIDDEN, dtype=torch.bfloat16)
    drafter.token = lambda hidden: functional.linear(hidden, square).repeat(1, DRAFTS)
    drafter.previous = [lambda hidden: functional.linear(hidden, square)] * (DRAFTS - 1)
    drafter.factorised, drafter.rank, drafter.factors, drafter.lead = True, RANK, DRAFTS, 1
    drafter.recurrence = None
    drafter.vocabulary = None if size is None else Unembedding(size)
    embeddings = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
    drafter.target = SimpleNamespace(
        lm_head=Unembedding(VOCABULARY), embed=lambda ids: functional.embedding(ids, embeddings)
    )
    drafter.requests_at_once = max(1, LOGITS_AT_ONCE // (DRAFTS * RANK * (size or VOCABULARY)))
    return drafter


@pytest.fixture(autouse=True)
def _kernels_that_allocate_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    monkeypatch.setenv(SWITCH, "always")
    monkeypatch.setattr(jit.JITFunction, "run", lambda *args, **kwargs: None)


def draft(drafter: CPDrafter, requests: int, sampled: bool) -> None:
    places, hidden = torch.zeros(requests, dtype=torch.int64), torch.empty(requests, HIDDEN, dtype=torch.bfloat16)
    sampling = Sampling(*torch.empty(3, requests), places, places) if sampled else None
    drafts = drafter.propose(DraftInputs(places, hidden, places, DRAFTS, sampling))
    assert drafts.token_ids.shape == (requests, DRAFTS)


@pytest.mark.parametrize(("draft_vocabulary", "most"), [(8192, 200), (None, 1200)])
@pytest.mark.parametrize("sampled", [False, True])
def test_memory(draft_vocabulary: int | None, most: int, sampled: bool) -> None:
    with FakeTensorMode():
        drafter = drafter_of(draft_vocabulary)
        with Allocated() as allocated:
            draft(drafter, REQUESTS, sampled)
    assert 10 * MIB < allocated.peak < most * MIB


def test_a_whole_vocabulary_takes_a_quarter_of_a_targets_step_at_most() -> None:
    """At batch 256, by the roofline of the verified tokens' pass, without its reads of KV."""
    requests = 256
    with FakeTensorMode(), FlopCounterMode(display=False) as flop:
        drafter = drafter_of(None)
        draft(drafter, requests, sampled=True)
    reads = -(-requests // drafter.requests_at_once)  # of the LM head
    logits = requests * DRAFTS * RANK * VOCABULARY
    traffic = 2 * (reads * VOCABULARY * HIDDEN + 4 * logits)  # written, and read by three kernels
    step = max(2 * TARGET * requests * (1 + DRAFTS) / PEAK, 2 * TARGET / BANDWIDTH)
    assert max(flop.get_total_flops() / PEAK, traffic / BANDWIDTH) < step / 4
