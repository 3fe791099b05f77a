# SPDX-License-Identifier: Apache-2.0
"""vLLM's own features with drafting: greedy output is vLLM's with the feature, and
drafts are accepted.
"""

import gc
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from cases import CASES, greedy, prompts
from conftest import Factory, counting, drafter_of, full_but, runner_of, start_engine
from methods import METHODS
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.engine.worker import DraftingWorker

pytestmark = pytest.mark.engine

# Reads input embeddings and the LM head
RECURRENT = {
    "rank": 3,
    "condition": "recurrent",
    "expert_rank": 4,
}
LAYERS = {"rank": 3, "condition": "recurrent", "expert_rank": 4, "layers": (1, 3)}


@pytest.fixture(scope="module")
def adapter(
    tiny_model: Factory, tmp_path_factory: pytest.TempPathFactory
) -> LoRARequest:
    folder = adapters.make_adapter(tmp_path_factory.mktemp("lora"), tiny_model())
    return LoRARequest("random", 1, str(folder))


HEADS = [("cp", RECURRENT), ("recurrent", {}), ("cp", LAYERS)]


@pytest.mark.parametrize(
    ("kind", "how"), full_but(HEADS[:2], HEADS), ids=["cp", "recurrent", "layers"]
)
def test_lora(
    engine: Factory,
    fitted_heads: Factory,
    adapter: LoRARequest,
    kind: str,
    how: dict[str, Any],
) -> None:
    """Requests with an adapter beside others without."""
    # vLLM's CPU build gives requests without an adapter the last one's place, which
    # must be empty.
    settings = {"enable_lora": True, "max_lora_rank": adapters.RANK, "max_loras": 2}
    options = {"method": kind, "model": fitted_heads(kind, **how)}
    chosen = [adapter if i % 2 else None for i in range(16)]

    def said(llm: Any, draft: bool = True) -> tuple[list[list[int]], Any]:
        """Output and counts; without draft, adapted requests do not."""
        with counting(llm) as seen:
            params = [
                greedy(extra_args={"ppd_draft": draft or request is None})
                for request in chosen
            ]
            outputs = llm.generate(
                prompts(16), params, use_tqdm=False, lora_request=chosen
            )
        return [list(output.outputs[0].token_ids) for output in outputs], seen

    expected = said(engine(**settings))[0]
    llm = engine(options, **settings)
    base = engine(options)
    plain = CASES["batch_16"](engine())
    assert [tokens == expected[i] for i, tokens in enumerate(plain)] == [
        i % 2 == 0 for i in range(16)
    ]
    tokens, counts = said(llm)
    assert tokens == expected
    assert counts["accepted"] > 0
    # Drafts are those of an engine without adapters.
    tokens, counts = said(llm, draft=False)
    assert tokens == expected
    with counting(base) as seen:
        base.generate(prompts(16)[::2], greedy(), use_tqdm=False)
    assert counts["accepted"] == seen["accepted"] > 0
    target = drafter_of(llm).target
    hidden = torch.randn(40, 64)
    ids = torch.arange(40)
    torch.testing.assert_close(
        target.lm_head.logits(hidden),
        drafter_of(base).target.lm_head.logits(hidden),
        rtol=0,
        atol=1e-5,
    )
    torch.testing.assert_close(
        target.embed(ids), drafter_of(base).target.embed(ids), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", METHODS)
def test_kv_connector(
    engine: Factory,
    with_heads: Factory,
    tiny_model: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """KV of prompts is stored and loaded, that of draft layers included; drafts are
    never stored.
    """
    where = {"shared_storage_path": str(tmp_path)}
    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config=where,
    )
    requests = prompts(4, 100)
    options = with_heads({**METHODS[name], "adaptive": True, "step_costs": "measure"})
    expected = [
        list(o.outputs[0].token_ids)
        for o in engine().generate(requests, greedy(), use_tqdm=False)
    ]
    # One a process, and its end is the test's
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    # The connector stores prompts that are taken in at once.
    llm = start_engine(
        tiny_model(), options, kv_transfer_config=connector, max_num_batched_tokens=512
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert len(scheduler.policy.seconds.table.sizes) > 1, (
        "step costs were not measured beside a connector"
    )
    scheduler.policy = None  # every step drafts
    stored: list[set[str]] = []
    for hit in (False, True):
        with counting(llm) as seen:
            outputs = llm.generate(requests, greedy(), use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            hits = [
                32 * ((len(request["prompt_token_ids"]) - 1) // 32) * hit
                for request in requests
            ]
            assert [output.num_cached_tokens for output in outputs] == hits
        assert seen["accepted"] > 0
        stored.append({path.name for path in tmp_path.rglob("*.safetensors")})
    layers = len(runner_of(llm).compilation_config.static_forward_context)
    assert stored[0] == stored[1] and len(stored[0]) == layers == 6 + 2 * (
        name == "dynamo"
    )


class Pool:
    """What a worker allocates while it loads a model, as vLLM's allocator for sleep
    mode would have it on a GPU.
    """

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.kept: dict[int, torch.Tensor] = {}

    @staticmethod
    def alive() -> dict[int, torch.UntypedStorage]:
        tensors = [
            tensor
            for tensor in gc.get_objects()
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        ]
        storages = [
            tensor.untyped_storage()
            for tensor in tensors
            if tensor.device.type == "cpu"
        ]
        return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}

    def suspend(self) -> None:
        for address, storage in self.storages.items():
            self.kept[address] = (
                torch.tensor([], dtype=torch.uint8).set_(storage).clone()
            )
            torch.tensor([], dtype=torch.uint8).set_(storage).fill_(0x42)

    def resume(self) -> None:
        for address, storage in self.storages.items():
            torch.tensor([], dtype=torch.uint8).set_(storage).copy_(self.kept[address])


@pytest.mark.parametrize("name", METHODS)
def test_sleep_level_1(
    engine: Factory,
    with_heads: Factory,
    tiny_model: Factory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """What was allocated while loading comes back, the KV cache does not. (The CPU
    build has no sleep mode of its own: the worker does to this memory what vLLM's
    allocator does on a GPU.)"""
    pool = Pool()
    load = DraftingWorker.load_model

    def load_model(self: Any, **kwargs: Any) -> None:
        before = Pool.alive()
        load(self, **kwargs)
        pool.storages = {
            address: storage
            for address, storage in Pool.alive().items()
            if address not in before
        }

    def sleep(self: Any, level: int = 1) -> None:
        pool.suspend()
        for cache in self.model_runner.kv_caches:
            cache.fill_(42.0)

    monkeypatch.setattr(
        type(current_platform), "is_sleep_mode_available", lambda self: True
    )
    monkeypatch.setattr(DraftingWorker, "load_model", load_model)
    monkeypatch.setattr(DraftingWorker, "sleep", sleep)
    monkeypatch.setattr(
        DraftingWorker, "wake_up", lambda self, tags=None: pool.resume()
    )
    llm = start_engine(
        tiny_model(),
        with_heads(METHODS[name]),
        enable_sleep_mode=True,
        enable_prefix_caching=True,
    )
    expected = CASES["batch_16"](engine())
    assert CASES["batch_16"](llm) == expected
    with pytest.raises(
        OptionError, match=r"sleep level 2 is not supported .* use level 1"
    ):
        llm.sleep(level=2)
    llm.sleep(level=1)
    llm.wake_up()
    with counting(llm) as seen:
        assert CASES["batch_16"](llm) == expected
    assert seen["accepted"] > 0.02 * seen["drafted"] > 0
    assert len(pool.kept) > 20
