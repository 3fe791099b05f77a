# SPDX-License-Identifier: Apache-2.0
"""What the patches and overrides assume of vLLM, and that a vLLM that does not ask for
us is not touched.
"""

import inspect
import json
import logging
import os
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from cases import generate, greedy, prompts
from configured import from_dict
from conftest import ROOT, Factory, our_log, runner_of
from huggingface_hub.errors import LocalEntryNotFoundError
from touched import resolved
from vllm import EngineArgs
from vllm.config import vllm as vllm_module
from vllm.engine import arg_utils
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.platforms import current_platform
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput

from vllm_ppd.vllm_plugins import patches, register
from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.engine.cpu.workarounds import mend_workers_to_come
from vllm_ppd.vllm_plugins.patches import scheduling, start

register()


def test_counters_find_room_in_vllms_messages() -> None:
    assert (
        SchedulerStats.__annotations__["kv_connector_stats"] == dict[str, Any] | None
    ), "no longer an open dictionary"
    assert not hasattr(ModelRunnerOutput, "__slots__"), (
        "no attribute of ours would go with it"
    )


def test_requests_are_checked_before_a_response_streams() -> None:
    """Both are generators that get the parameters when they are made; vLLM makes them
    before it answers.
    """
    for symbol in (
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._generate_with_builtin_tools",
    ):
        stock = resolved(symbol)
        assert (
            inspect.isasyncgenfunction(stock)
            and "sampling_params" in inspect.signature(stock).parameters
        )
    for serving, made, streams in (
        (
            OpenAIServingCompletion._create_completion,
            "self.engine_client.generate(",
            "self.completion_stream_gen",
        ),
        (
            OpenAIServingChat._create_chat_completion,
            "self.engine_client.generate(",
            "self.chat_completion_stream_gen",
        ),
        (
            OpenAIServingResponses._create_responses,
            "self._generate_with_builtin_tools(",
            "self.responses_stream_gen",
        ),
    ):
        source = inspect.getsource(serving)
        assert 0 < source.find(made) < source.find(streams), (
            f"{serving.__qualname__} streams before it asks the engine"
        )


def test_names_of_heads_stay_as_they_are_offline() -> None:
    assert arg_utils.get_model_path("acme/heads@v2", None) == "acme/heads@v2"
    with pytest.raises(LocalEntryNotFoundError):
        arg_utils.get_model_path("acme/model", None)


def patched() -> list[Any]:
    """What stands where each patch is."""
    places = [(*owner.partition(":")[::2], name) for owner, name, _ in patches.PATCHES]
    owners = [
        getattr(sys.modules[module], cls) if cls else sys.modules[module]
        for module, cls, _ in places
    ]
    return [
        vars(owner)[name] for owner, (_, _, name) in zip(owners, places, strict=True)
    ]


def test_registration_is_idempotent() -> None:
    before = patched()
    register()
    assert all(a is b for a, b in zip(before, patched(), strict=True))


def test_entry_point() -> None:
    points = [
        point
        for point in entry_points(group="vllm.general_plugins")
        if point.name == "vllm_ppd"
    ]
    assert [point.load() for point in points] == [register]


def test_unsupported_vllm(
    tiny_model: Factory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Outside the range: one line, nothing patched but the refusal, and the range in
    the refusal.
    """
    wrapped: list[str] = []
    monkeypatch.setattr(patches, "vllm_version", lambda: "0.99.0")
    monkeypatch.setattr(
        patches, "wrap", lambda owner, name, wrapper: wrapped.append(name)
    )
    with caplog.at_level(logging.WARNING, logger="vllm.vllm_ppd"):
        patches.install()
    assert wrapped == ["excepthook", "create_speculative_config"]
    assert len(caplog.messages) == 1
    assert "0.99.0" in caplog.messages[0]

    def started(**asked: Any) -> Any:
        return patches.refuse_methods(
            lambda self: "stock", EngineArgs(model=str(tiny_model()), **asked)
        )

    assert started(speculative_config={"method": "ngram"}) == started() == "stock"
    for asked in (
        {"speculative_config": {"method": "ppd", "exit_layer": 3}},
        {"spec_model": "paradecode"},
    ):
        with pytest.raises(
            OptionError, match=r"supports vLLM .*<0.34.* found 0\.99\.0"
        ):
            started(**asked)


def test_runner_v2_and_asynchronous_scheduling_are_open_to_us(
    tiny_model: Factory,
) -> None:
    """vLLM 0.32 starts no proposer class on V2, and grants asynchronous scheduling a
    closed list of methods.
    """
    vllm_config = from_dict(tiny_model(), {"method": "ppd", "exit_layer": 3})
    assert (
        vllm_config.use_v2_model_runner
        and vllm_config.scheduler_config.async_scheduling
    )
    assert not vllm_config._get_v2_model_runner_unsupported_features()
    assert "custom_class" in start.complete_config(
        lambda self: get_args(vllm_module.NgramGPUTypes), vllm_config
    )
    assert "custom_class" not in get_args(vllm_module.NgramGPUTypes)
    vllm_config.additional_config = {}
    assert any(
        "custom_class" in feature
        for feature in vllm_config._get_v2_model_runner_unsupported_features()
    )


def test_data_parallel_ranks_choose_their_drafts(tiny_model: Factory) -> None:
    """vLLM takes the choice from every model, though ranks of a dense one are independent."""
    schedule = [(1, 1, 3), (2, 8, 0)]
    for ours in ({}, {"method": "ppd", "exit_layer": 3}):
        asked = ours or {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
        }
        vllm_config = from_dict(tiny_model(), asked)
        vllm_config.parallel_config.data_parallel_size = 2
        vllm_config.speculative_config.num_speculative_tokens_per_batch_size = schedule
        vllm_config._maybe_disable_dynamic_sd_for_data_parallel()
        kept = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        assert kept == (schedule if ours else None)


def test_ranks_that_step_together_say_that_every_step_drafts(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "watch_acceptance", lambda scheduler: None)
    vllm_config = from_dict(tiny_model(), {"method": "ppd", "exit_layer": 3})
    for ranks in (1, 2):
        vllm_config.parallel_config.data_parallel_size = ranks
        scheduler = SimpleNamespace(max_num_running_reqs=4)
        with our_log(logging.WARNING) as messages:
            scheduling.make_scheduler(lambda *args: None, scheduler, vllm_config)
        assert (scheduler.dynamic_sd_lookup is None) == (ranks == 2)
        assert any("every step drafts" in message for message in messages) == (
            ranks == 2
        )


def test_version_range() -> None:
    assert all(
        patches.is_supported(version)
        for version in ("0.32.0", "0.32.0+cpu", "0.32.1", "0.33.0", "0.33.0+cpu")
    )
    assert not any(
        patches.is_supported(version)
        for version in ("0.31.2", "0.34.0", "0.34.0rc1", "1.0", "unknown")
    )


def test_compilation_cache_key_is_stable(tiny_model: Factory) -> None:
    """The same server started twice finds what it compiled; another exit layer does not."""

    def key(**options: Any) -> str:
        return from_dict(
            tiny_model(), {"method": "ppd", "exit_layer": 3, **options}
        ).compute_hash()

    assert key() == key() != key(exit_layer=2)


# ---- a vLLM started without our flag


def test_stock_configuration(tiny_model: Factory) -> None:
    """No option of ours, no trace of us; vLLM's own speculation keeps working through
    the wrappers.
    """
    plain, ngram = (
        from_dict(tiny_model(), options)
        for options in (None, {"method": "ngram", "num_speculative_tokens": 2})
    )
    assert plain.additional_config == ngram.additional_config == {}
    assert (
        plain.speculative_config is None and ngram.speculative_config.method == "ngram"
    )
    assert "vllm_ppd" not in plain.parallel_config.worker_cls
    assert plain.num_lookahead_tokens == 0


@pytest.mark.engine
def test_stock_engine_runs_stock_code(engine: Factory) -> None:
    runner = runner_of(engine())
    assert not [cls for cls in type(runner).__mro__ if "vllm_ppd" in cls.__module__]
    decoder = runner.model.model
    assert "forward" not in vars(decoder)
    assert not hasattr(runner, "drafter")


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
import conftest, cases, json
if __name__ == "__main__":
    print("TOKENS", json.dumps(cases.batch_16(conftest.start_engine({model!r}, None))))
"""


@pytest.mark.full
@pytest.mark.engine
def test_output_is_that_of_a_vllm_without_us(
    engine: Factory, tiny_model: Factory
) -> None:
    """The same requests in a process where VLLM_PLUGINS switches us off."""
    script = SCRIPT.format(tests=str(ROOT / "tests"), model=str(tiny_model()))
    environment = {**os.environ, "VLLM_PLUGINS": ""}
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert "vllm-ppd" not in run.stdout + run.stderr
    tokens = next(
        line for line in run.stdout.splitlines() if line.startswith("TOKENS ")
    )
    assert json.loads(tokens.removeprefix("TOKENS ")) == generate(
        engine(), prompts(16), greedy()
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="not a CPU build")
def test_vllms_own_methods_on_a_cpu_are_mended() -> None:
    """Its backend drops sampling parameters of drafts, which measurements of these
    methods must not have.
    """
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    mend_workers_to_come()
    # As every worker does when it starts
    current_platform.register_triton_kernel_overrides()
    for values in (
        torch.tensor([0.5, 0.0, 0.7]),
        torch.tensor([5, 0, 9], dtype=torch.int32),
    ):
        spread = expand_batch_to_tokens(
            values, torch.tensor([2, 2, 3], dtype=torch.int32), 3, 0, 1
        )
        assert spread.tolist() == [values[0].item(), values[0].item(), values[2].item()]
