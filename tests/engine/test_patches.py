# SPDX-License-Identifier: Apache-2.0
"""One test a patch: what moved in vLLM when it breaks, and that a vLLM that does not ask for us is not touched."""

from __future__ import annotations

import importlib
import inspect
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cases import generate, greedy, prompts
from conftest import ROOT, runner_of
from huggingface_hub.errors import LocalEntryNotFoundError
from vllm import EngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_cache_interface import KVCacheTensor
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_ppd.vllm_plugins import patches, register
from vllm_ppd.vllm_plugins.config import activation
from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.engine.v1.nonspeculative_steps import NonSpeculativeSteps

register()


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def original(owner: type, name: str) -> Any:
    """What our wrapper replaced."""
    attribute = owner.__dict__[name]
    wrapper = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
    return getattr(wrapper, patches._MARK)


def seams_now() -> list[Any]:
    """What stands where each patch is."""
    owners = [owner.partition(":") for owner, _, _ in patches.PATCHES]
    found = [vars(sys.modules[module])[cls] if cls else sys.modules[module] for module, _, cls in owners]
    return [vars(owner)[name] for owner, (_, name, _) in zip(found, patches.PATCHES, strict=True)]


def test_registration_is_idempotent() -> None:
    before = seams_now()
    register()
    assert all(a is b for a, b in zip(before, seams_now(), strict=True))


def test_entry_point() -> None:
    from importlib.metadata import entry_points

    points = [point for point in entry_points(group="vllm.general_plugins") if point.name == "vllm_ppd"]
    assert [point.load() for point in points] == [register]


def test_patch_flags() -> None:
    assert isinstance(original(EngineArgs, "add_cli_args"), staticmethod)
    assert isinstance(original(EngineArgs, "from_cli_args"), classmethod)
    assert {"spec_method", "spec_model", "spec_tokens", "speculative_config", "additional_config"} <= set(
        EngineArgs.__dataclass_fields__
    ), "EngineArgs lost a field that our flags fill"


def test_patch_method() -> None:
    assert parameters(original(EngineArgs, "create_speculative_config")) == [
        "self", "target_model_config", "target_parallel_config",
    ]  # fmt: skip
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    assert parameters(create_custom_proposer) == ["vllm_config"]


def test_patch_served_heads() -> None:
    from vllm.engine import arg_utils

    stock = getattr(arg_utils.maybe_override_with_speculators, patches._MARK)
    assert {"model", "tokenizer", "vllm_speculative_config"} <= set(parameters(stock))
    called = inspect.getsource(EngineArgs.create_engine_config)
    assert "vllm_speculative_config=self.speculative_config" in called, "heads are found some other way"
    assert "(self.model, self.tokenizer, self.speculative_config) =" in called, "it returns something else"


def test_patch_names_of_heads_offline() -> None:
    from vllm.engine import arg_utils

    assert parameters(getattr(arg_utils.get_model_path, patches._MARK)) == ["model", "revision"]
    assert arg_utils.get_model_path("acme/heads@v2", None) == "acme/heads@v2"
    assert "self.model = get_model_path(self.model, self.revision)" in inspect.getsource(EngineArgs.__post_init__)
    with pytest.raises(LocalEntryNotFoundError):
        arg_utils.get_model_path("acme/model", None)


def test_patch_statistics() -> None:
    """The way of our counters: ModelRunnerOutput -> Scheduler -> SchedulerStats -> StatLoggerManager."""
    assert parameters(original(Scheduler, "update_from_output"))[:3] == [
        "self", "scheduler_output", "model_runner_output",
    ]  # fmt: skip
    assert "self.make_stats(" in inspect.getsource(original(Scheduler, "update_from_output"))
    assert SchedulerStats.__annotations__["kv_connector_stats"] == dict[str, Any] | None, "no longer an open dictionary"
    assert parameters(original(StatLoggerManager, "__init__"))[:2] == ["self", "vllm_config"]
    assert parameters(original(StatLoggerManager, "record"))[:2] == ["self", "scheduler_stats"]
    assert "engine_indexes" in inspect.getsource(original(StatLoggerManager, "__init__"))
    assert not hasattr(ModelRunnerOutput, "__slots__"), "no attribute of ours would go with it"


def test_patch_lookahead() -> None:
    assert isinstance(original(VllmConfig, "num_lookahead_tokens"), property)
    source = inspect.getsource(importlib.import_module("vllm.v1.core.sched.scheduler"))
    assert "vllm_config.num_lookahead_tokens" in source, "the scheduler reserves drafted positions some other way"


def test_patch_asynchronous_scheduling() -> None:
    source = inspect.getsource(original(VllmConfig, "__post_init__"))
    assert "method not in get_args(NgramGPUTypes)" in source, (
        "vLLM tells methods that schedule asynchronously otherwise"
    )


def test_patch_post_step() -> None:
    assert parameters(original(EngineCore, "post_step")) == ["self", "model_executed"]
    source = inspect.getsource(original(EngineCore, "post_step"))
    assert "take_draft_token_ids" in source and "is not None" in source, "None no longer says that nobody drafts"


def test_patch_sleep() -> None:
    assert parameters(original(EngineCore, "sleep")) == ["self", "level", "mode"]
    source = inspect.getsource(original(EngineCore, "sleep"))
    assert source.index("self.pause_scheduler(") < source.index("model_executor.sleep(level)")


def test_patch_kv_connector() -> None:
    """What unseen_by_connectors hides, and what says that a connector works by layers."""
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    assert "return _KV_CONNECTOR_AGENT is not None" in inspect.getsource(kv_transfer_state.has_kv_transfer_group)
    assert parameters(KVConnectorBase_V1.requires_piecewise_for_cudagraph) == ["extra_config"]


def test_patch_placeholder_drafts() -> None:
    assert parameters(original(Scheduler, "__init__"))[:2] == ["self", "vllm_config"]
    source = inspect.getsource(Scheduler)
    assert source.count("pad_spec_decode = True") == 1 and "self.dynamic_sd_lookup is None)" in source
    assert source.count("self.dynamic_sd_lookup[") == 1, "more than the number of drafts now follows the batch size"


def test_patch_scheduler() -> None:
    """What a worker group's scheduler and stages build on."""
    assert {"has_requests", "schedule", "get_request_counts"} <= set(dir(Scheduler))
    source = inspect.getsource(Scheduler)
    assert "request.spec_token_ids = []" in source, "placeholder drafts are no longer taken at scheduling"
    assert "request.num_in_flight_tokens" in source
    assert {"num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens"} <= set(
        SchedulerOutput.__dataclass_fields__
    )
    assert {"size", "layer_stride", "block_stride", "offset"} == set(KVCacheTensor.__dataclass_fields__) - {
        "layers", "host_resident",
    }, "the KV cache is laid out some other way: see kv_blocks.added_blocks"  # fmt: skip


def test_patch_request_validation() -> None:
    assert parameters(original(InputProcessor, "_validate_params"))[:2] == ["self", "params"]


def test_patch_validation_before_streaming() -> None:
    """Both are generators that get the parameters when they are made; vLLM makes them before it answers."""
    for owner, name in ((AsyncLLM, "generate"), (OpenAIServingResponses, "_generate_with_builtin_tools")):
        stock = original(owner, name)
        assert inspect.isasyncgenfunction(stock), f"{name} runs when it is called"
        assert "sampling_params" in parameters(stock)
    assert "vllm_config" in parameters(AsyncLLM.__init__)
    for serving, made, streams in (
        (OpenAIServingCompletion._create_completion, "self.engine_client.generate(", "self.completion_stream_gen"),
        (OpenAIServingChat._create_chat_completion, "self.engine_client.generate(", "self.chat_completion_stream_gen"),
        (OpenAIServingResponses._create_responses, "self._generate_with_builtin_tools(", "self.responses_stream_gen"),
    ):
        source = inspect.getsource(serving)
        assert 0 < source.find(made) < source.find(streams), f"{serving.__qualname__} streams before it asks the engine"


def test_patch_worker() -> None:
    assert parameters(Worker._make_model_runner) == ["self"], "the GPU worker builds its runner elsewhere"
    from vllm.v1.worker import cpu_worker

    assert "CPUModelRunner(self.vllm_config" in inspect.getsource(cpu_worker.CPUWorker.init_device), (
        "the CPU worker no longer takes its runner from the module global"
    )


def test_patch_runner() -> None:
    assert parameters(GPUModelRunner._model_forward) == [
        "self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs",
    ]  # fmt: skip
    assert parameters(GPUModelRunner.propose_draft_token_ids) == [
        "self", "scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states", "sample_hidden_states",
        "aux_hidden_states", "spec_decode_metadata", "common_attn_metadata", "slot_mappings",
    ]  # fmt: skip
    assert parameters(GPUModelRunner._prepare_inputs) == ["self", "scheduler_output", "num_scheduled_tokens"]
    prepares = inspect.getsource(GPUModelRunner._prepare_inputs)
    assert prepares.count("self.speculative_config") == 1, "it does more than compute the metadata of drafts"
    padding = parameters(GPUModelRunner._determine_batch_execution_and_padding)
    assert padding[:3] == ["self", "num_tokens", "num_reqs"]
    assert parameters(GPUModelRunner._update_states) == ["self", "scheduler_output"]
    assert parameters(GPUModelRunner._input_fits_in_drafter) == ["self", "common_attn_metadata"]
    source = inspect.getsource(GPUModelRunner)
    for attribute in (
        "self._draft_probs", "self._draft_prob_req_ids", "self.attn_groups", "self.query_start_loc",
        "self.kv_cache_config.kv_cache_groups", "self.kv_cache_config.num_blocks",
    ):  # fmt: skip
        assert attribute in source, f"{attribute} is gone from the runner"


def test_unsupported_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Outside the range: one line, nothing patched but the refusal, and the range in the refusal."""
    wrapped: list[str] = []
    monkeypatch.setattr(patches, "vllm_version", lambda: "0.99.0")
    monkeypatch.setattr(patches, "_wrap", lambda owner, name, make: wrapped.append(name))
    with caplog.at_level(logging.WARNING, logger="vllm.vllm_ppd"):
        patches.install()
    assert wrapped == ["create_speculative_config"]
    assert len(caplog.messages) == 1
    assert "0.99.0" in caplog.messages[0]
    refuse = patches._refuse_methods(lambda self: "stock")
    stock = {"speculative_config": None, "spec_method": None, "spec_model": None}
    assert refuse(SimpleNamespace(**{**stock, "speculative_config": {"method": "ngram"}})) == "stock"
    for asked in ({"speculative_config": {"method": "ppd"}}, {"spec_model": "paradecode"}):
        with pytest.raises(OptionError, match=r"supports vLLM .*<0.34.* found 0\.99\.0"):
            refuse(SimpleNamespace(**{**stock, **asked}))


def test_version_range() -> None:
    assert all(patches.is_supported(version) for version in ("0.32.0", "0.32.0+cpu", "0.32.1", "0.33.0", "0.33.0+cpu"))
    assert not any(patches.is_supported(version) for version in ("0.31.2", "0.34.0", "0.34.0rc1", "1.0", "unknown"))


def test_compilation_cache_key_is_stable(tiny_model: Callable[..., Path]) -> None:
    """The same server started twice finds what it compiled; another exit layer does not."""

    def key(**options: Any) -> str:
        args = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24}
        speculative = {"method": "ppd", **options}
        return (
            EngineArgs(model=str(tiny_model()), speculative_config=speculative, **args)
            .create_engine_config()
            .compute_hash()
        )

    assert key() == key() != key(exit_layer=2)


# ---- a vLLM started without our flag


def test_stock_configuration(tiny_model: Callable[..., Path]) -> None:
    """No option of ours, no trace of us; vLLM's own speculation keeps working through the wrappers."""
    plain = EngineArgs(model=str(tiny_model()), dtype="float32", kv_cache_memory_bytes=1 << 24).create_engine_config()
    assert plain.additional_config == {}
    assert plain.speculative_config is None
    assert "vllm_ppd" not in plain.parallel_config.worker_cls
    assert plain.num_lookahead_tokens == original(VllmConfig, "num_lookahead_tokens").fget(plain) == 0
    ngram = EngineArgs(
        model=str(tiny_model()), dtype="float32", kv_cache_memory_bytes=1 << 24,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
    ).create_engine_config()  # fmt: skip
    assert ngram.speculative_config.method == "ngram"
    assert ngram.additional_config == {}


@pytest.mark.engine
def test_stock_engine_runs_stock_code(engine: Callable[..., Any]) -> None:
    runner = runner_of(engine())
    assert not [cls for cls in type(runner).__mro__ if "vllm_ppd" in cls.__module__]
    decoder = runner.model.model
    assert "forward" not in vars(decoder)
    assert not hasattr(runner, "drafter")


@pytest.mark.engine
def test_steps_without_drafts_are_prepared_as_without_speculation(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows to sample from are those of the same requests with metadata of no drafts; steps with drafts have theirs."""
    llm = engine({"method": "ppd", "adaptive": False})
    runner = runner_of(llm)
    prepare, configured = runner._prepare_inputs, runner.speculative_config
    seen = []

    def compared(scheduler_output: SchedulerOutput, scheduled: np.ndarray) -> Any:
        stock = super(NonSpeculativeSteps, runner)._prepare_inputs(scheduler_output, scheduled)
        ours = prepare(scheduler_output, scheduled)
        assert runner.speculative_config is configured
        assert (ours[0].tolist(), ours[2]) == (stock[0].tolist(), stock[2])
        drafted = any(stock[1].num_draft_tokens)
        assert (ours[1] is not None) == drafted
        seen.append((drafted, int(scheduled.sum())))
        return ours

    monkeypatch.setattr(runner, "_prepare_inputs", compared)
    generate(llm, prompts(3), greedy(6))
    assert any(drafted for drafted, _ in seen)
    assert any(not drafted and tokens > 3 for drafted, tokens in seen)  # prompts

    def fails(*args: Any) -> None:
        raise KeyError("anything")

    monkeypatch.setattr(GPUModelRunner, "_prepare_inputs", fails)
    with pytest.raises(KeyError):
        prepare(SimpleNamespace(scheduled_spec_decode_tokens={}), np.zeros(0))
    assert runner.speculative_config is configured


@pytest.mark.engine
def test_worker_groups_are_told_apart_once(engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafts are asked for after a step is not looked up in the configuration every time."""
    llm = engine({"method": "ppd"})
    generate(llm, prompts(1), greedy(4))
    looked_up = Mock(side_effect=activation.active_config)
    monkeypatch.setattr(activation, "active_config", looked_up)
    generate(llm, prompts(1), greedy(12))
    assert looked_up.call_count <= 1  # a request is checked against it


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
import conftest, cases, json
if __name__ == "__main__":
    print("TOKENS", json.dumps(cases.batch_16(conftest.start_engine({model!r}, None))))
"""


@pytest.mark.full
@pytest.mark.engine
def test_output_is_that_of_a_vllm_without_us(engine: Callable[..., Any], tiny_model: Callable[..., Path]) -> None:
    """The same requests in a process where VLLM_PLUGINS switches us off."""
    import json
    import os

    script = SCRIPT.format(tests=str(ROOT / "tests"), model=str(tiny_model()))
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_PLUGINS": ""},
        check=True,
    )
    assert "vllm-ppd" not in run.stdout + run.stderr
    tokens = next(line for line in run.stdout.splitlines() if line.startswith("TOKENS "))
    assert json.loads(tokens.removeprefix("TOKENS ")) == generate(engine(), prompts(16), greedy())


@pytest.mark.engine
def test_cpu_mend_survives_another_engine(engine: Callable[..., Any]) -> None:
    """vLLM's CPU backend drops sampling parameters of drafts; ours must stay in place when a stock engine follows."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    engine({"method": "ppd"})
    current_platform.register_triton_kernel_overrides()  # as every worker does when it starts
    for values in (torch.tensor([0.5, 0.0, 0.7]), torch.tensor([5, 0, 9], dtype=torch.int32)):
        spread = expand_batch_to_tokens(values, torch.tensor([2, 2, 3], dtype=torch.int32), 3, 0, 1)
        assert spread.tolist() == [values[0].item(), values[0].item(), values[2].item()]
    spread = expand_batch_to_tokens(torch.tensor([0.0, 0.5]), torch.tensor([1, 2], dtype=torch.int32), 2, 0, 1)
    assert spread.tolist() == [1.0, 0.5]
