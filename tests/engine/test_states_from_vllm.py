# SPDX-License-Identifier: Apache-2.0
"""`--states-from vllm`: vLLM's states of packed documents are those of transformers, and
the training holds no layer of the target.
"""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Factory, keep_alive, patterned_texts, write_texts
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    example_hidden_states_connector as connector,
)
from vllm.distributed.kv_transfer.kv_transfer_state import (
    ensure_kv_transfer_shutdown,
)

from vllm_ppd.heads.cp.config import CPOptions
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.folder import check_folder
from vllm_ppd.heads.training import loop
from vllm_ppd.heads.training.extracted import ExtractedTarget
from vllm_ppd.vllm_plugins.engine import generation
from vllm_ppd.vllm_plugins.engine.generation import StatesEngine

pytestmark = pytest.mark.engine
Connector = connector.ExampleHiddenStatesConnector


def write_at_once(self: Any, pending: Any) -> None:
    """What vLLM's connector does in a CUDA stream."""
    blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
    slots = (blocks + torch.arange(self._block_size)).flatten()
    tokens = pending.token_ids
    states = connector.extract_from_kv_cache(self._kv_cache, slots, len(tokens))
    tensors = {"hidden_states": states.contiguous(), "token_ids": tokens.clone()}
    save_file(tensors, pending.filename)
    os.close(self._lock_fds.pop(pending.req_id))
    self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)


class Stepping(generation.LLM):
    """Steps until the connector has written: an engine in this process has no loop of
    its own.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().generate(*args, **kwargs)
        core: Any = self.llm_engine.engine_core
        while core.engine_core.scheduler.has_requests():
            core.engine_core.step()
        return outputs


def test_states_are_those_of_transformers(
    tiny_model: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(Connector, "_submit_async_write", write_at_once)
    monkeypatch.setattr(generation, "LLM", Stepping)
    engines: list[Any] = []
    monkeypatch.setattr(StatesEngine, "close", lambda self: engines.append(self))
    data = write_texts(tmp_path / "data.jsonl", patterned_texts(30, 3))
    given: dict[str, Any] = {
        "model": str(tiny_model()),
        "data": (str(data),),
        "steps": 2,
        "sequence_length": 48,
        "batch_size": 2,
        "held_out_fraction": 0.2,
        "layers": (2, 4),
        "dtype": "float32",
        "device": "cpu",
    }
    for source in ("vllm", "transformers"):
        folder = tmp_path / source
        heads = folder / "heads"
        options = CPOptions(
            **given,
            states_from=source,
            states_cache=str(folder / "states"),
            out=str(heads),
        )
        loop.train(options)
        assert check_folder(heads).kind == "cp"
    (engine,) = engines
    keep_alive(engine)
    ensure_kv_transfer_shutdown()  # the connector of this process
    theirs, ours = (
        sorted((tmp_path / source / "states").glob("*/*-*.safetensors"))
        for source in ("vllm", "transformers")
    )
    computed = {path.name: path for path in theirs}
    assert len(computed) > 20 and len(ours) > 5
    for path in ours:
        torch.testing.assert_close(
            load_file(computed[path.name]), load_file(path), rtol=0.02, atol=0.02
        )
    with pytest.raises(TrainingError, match="add --states-cache"):
        loop.train(
            CPOptions(**given, states_from="vllm", out=str(tmp_path / "x"))
        )


def test_the_training_holds_no_layer(tiny_model: Factory, tmp_path: Path) -> None:
    """But knows another model by its layers."""
    cpu = torch.device("cpu")
    target = ExtractedTarget(str(tiny_model("gemma3")), cpu, torch.float32)
    assert len(target.layers) == 0 and target.num_layers == 6
    names = {name for name, _ in target.model.named_parameters()}
    assert not any("layers" in name for name in names)
    tuned = Path(shutil.copytree(tiny_model("gemma3"), tmp_path / "tuned"))
    weights = load_file(tuned / "model.safetensors")
    next(w for name, w in weights.items() if "down_proj" in name).mul_(1.01)
    save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    other = ExtractedTarget(str(tuned), cpu, torch.float32)
    assert other.digest() != target.digest()
