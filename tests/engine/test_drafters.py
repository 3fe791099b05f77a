# SPDX-License-Identifier: Apache-2.0
"""Drafters are tensor programs: nothing in propose waits for the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, generate, prompts
from conftest import Factory, counting, drafter_of
from vllm import SamplingParams

from vllm_ppd.kernels import sampling

pytestmark = pytest.mark.engine
WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


class Watch:
    """While on, whatever reads a tensor's values on the host raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        for name in WAITS:
            monkeypatch.setattr(torch.Tensor, name, self._refusing(name, getattr(torch.Tensor, name)))
        monkeypatch.setattr(torch, "nonzero", self._refusing("nonzero", torch.nonzero))
        plain = torch.Tensor.__getitem__

        def getitem(tensor: torch.Tensor, index: Any) -> torch.Tensor:
            parts = index if isinstance(index, tuple) else (index,)
            masks = [part for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.bool]
            assert not (self.on and masks), "a boolean mask as an index"
            return plain(tensor, index)

        monkeypatch.setattr(torch.Tensor, "__getitem__", getitem)

    def _refusing(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert not self.on, f"{name} inside propose"
            return plain(*args, **kwargs)

        return call

    def around(self, call: Callable[..., Any], on: bool) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            before, self.on = self.on, on
            try:
                return call(*args, **kwargs)
            finally:
                self.on = before

        return watched


METHODS: dict[str, dict[str, Any]] = {
    "early": {"method": "ppd", "gamma": 0.02, "heads": ("early", {})},
    "cp": {"method": "cp", "heads": ("cp", {})},
    "cp-chain": {"method": "cp", "draft_vocab_size": 100, "heads": ("cp", {"condition": "chain"})},
    "dynamo": {"method": "dynamo", "eps_b": 0.1, "heads": ("dynamo", {})},
    "recurrent": {"method": "recurrent", "draft_vocab_size": 100, "heads": ("recurrent", {"tie_weights": False})},
}


@pytest.mark.parametrize("method", METHODS)
def test_propose_never_waits_for_the_device(
    engine: Factory, with_heads: Factory, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(with_heads(METHODS[method]))
    proposer = drafter_of(llm)
    monkeypatch.setattr(sampling, "known_unlimited", lambda *_: False)  # as on a GPU
    watch, drafter = Watch(monkeypatch), proposer.host.drafter
    monkeypatch.setattr(drafter, "propose", watch.around(drafter.propose, True))
    if hasattr(proposer, "passes"):  # the V1 runner builds attention metadata on the host
        monkeypatch.setattr(proposer.passes, "first", watch.around(proposer.passes.first, False))
    with counting(llm) as seen:
        CASES["batch_16"](llm)
        generate(llm, prompts(6), SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=12))
    assert seen["accepted"] > 0


def test_the_watch_sees_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, tensor = Watch(monkeypatch), torch.arange(3)
    for waits in (tensor.tolist, lambda: tensor[tensor > 1], lambda: bool(tensor[0]), lambda: torch.nonzero(tensor)):
        waits()
        with pytest.raises(AssertionError):
            watch.around(waits, True)()
