# SPDX-License-Identifier: Apache-2.0
"""Which model runner drafts: vLLM's own choice where the method runs on both, and one clear line where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm import EngineArgs
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.layout import Calibrated, TargetLayers
from vllm_ppd.vllm_plugins import platform, register
from vllm_ppd.vllm_plugins.config import activation
from vllm_ppd.vllm_plugins.config.options import CONFIG_KEY, OptionError, parse_options
from vllm_ppd.vllm_plugins.config.refusals import of_scheduling, refuse
from vllm_ppd.vllm_plugins.config.resolve import Runners, resolve
from vllm_ppd.vllm_plugins.config.resolved import WORKERS
from vllm_ppd.vllm_plugins.patches import start

register()
GPU = Runners(None, "v2", True)
CPU_BUILD = Runners(None, "v1", False)


NOTHING = {"async_scheduling": None, "watermark_config": None, "enforce_eager": None}


def chosen(options: dict[str, Any], runners: Runners = GPU, stages: int = 1) -> Any:
    return resolve(parse_options(options), 12, None, stages, runners)


def test_v2_where_vllm_takes_it() -> None:
    config = chosen({"method": "cp"})
    assert (config.runner, config.v1_because, config.worker) == ("v2", None, WORKERS["v2"])
    assert not config.adaptive  # how many drafts is vLLM's there
    assert "runner V2" in config.summary()
    for runners in (CPU_BUILD, Runners("v1", "v2", True)):
        config = chosen({"method": "cp"}, runners)
        assert (config.runner, config.adaptive, config.worker) == ("v1", True, WORKERS["v1"])


@pytest.mark.parametrize(
    ("options", "stages", "reason"),
    [
        ({"method": "ppd"}, 2, "pipeline parallelism"),
        ({"method": "paradecode", "schedule": "parallel"}, 1, "schedule: parallel"),
        ({"method": "dynamo", "verify": False}, 1, "verify: false"),
        ({"method": "ppd", "exit_layer": [2, 4]}, 1, "several exit layers"),
        ({"method": "cp", "prompt_lookup_min": 2}, 1, "prompt_lookup_min"),
    ],
)
def test_v1_where_v2_cannot(options: dict[str, Any], stages: int, reason: str) -> None:
    config = chosen(options, stages=stages)
    assert (config.runner, config.v1_because) == ("v1", reason)
    assert f"runner V1 ({reason})" in config.summary()
    for said, runners in (("VLLM_USE_V2_MODEL_RUNNER=1", Runners("v2", "v2", True)), ("runner=v2", GPU)):
        forced = {**options, "runner": "v2"} if said == "runner=v2" else options
        with pytest.raises(OptionError, match=f"^{said} is not supported with {reason}"):
            chosen(forced, runners, stages)


def test_the_option_goes_before_the_environment() -> None:
    assert chosen({"method": "cp", "runner": "v1"}, Runners("v2", "v2", True)).runner == "v1"
    assert chosen({"method": "cp", "runner": "v2"}, Runners("v1", "v2", True)).runner == "v2"
    with pytest.raises(OptionError, match=r"^runner=v2 needs Triton"):
        chosen({"method": "cp", "runner": "v2"}, CPU_BUILD)


def test_exit_on_a_gpu_is_a_quarter() -> None:
    assert chosen({"method": "ppd"}).exit_layer == (3,)
    assert chosen({"method": "ppd"}, CPU_BUILD).exit_layer == (6,)
    assert chosen({"method": "ppd", "exit_layer": 5}).exit_layer == (5,)
    assert chosen({"method": "ppd"}, stages=2).exit_layer == (6,)


def test_options_that_are_v1s() -> None:
    given = {"method": "cp", "step_costs": "measure"}
    with pytest.raises(OptionError, match=r"^step_costs.* runner V2.*give runner v1"):
        chosen(given)
    assert chosen({**given, "runner": "v1"}).runner == "v1"


def test_adaptive_on_v2_is_vllms_verification() -> None:
    """On request; by default every draft of the batch is verified."""
    assert chosen({"method": "cp"}).choice_of_drafts() == {}
    config = chosen({"method": "cp", "adaptive": True})
    assert config.choice_of_drafts() == {"enable_adaptive_verification": True}
    assert chosen({"method": "cp", "adaptive": True, "runner": "v1"}).choice_of_drafts() == {}


def test_drafts_by_batch_size_are_the_calibrations() -> None:
    """On the device that was measured, unless the user gives a number of drafts or an exit."""
    ranges = [[1, 4, 3], [5, 16, 1], [17, 2**31 - 1, 0]]
    measured = Calibrated(device="NVIDIA H100", num_speculative_tokens_per_batch_size=ranges)
    heads: Any = CPConfig(
        verifier="m", positions=4, rank=2, num_speculative_tokens=3, calibration=measured,
        target=TargetLayers(model_type="llama", hidden_size=8, vocab_size=64, num_hidden_layers=12),
    )  # fmt: skip

    def ranges_of(device: str = "NVIDIA H100", **given: Any) -> Any:
        options = parse_options({"method": "cp", "model": "heads", **given})
        config = resolve(options, 12, heads, 1, GPU._replace(device=device))
        return config.choice_of_drafts().get("num_speculative_tokens_per_batch_size")

    assert ranges_of() == [tuple(part) for part in ranges]
    assert ranges_of("NVIDIA L4") is None
    assert ranges_of(num_speculative_tokens=2) is None
    assert ranges_of(runner="v1") is None
    assert ranges_of(disable_by_batch_size=8) == [(1, 4, 3), (5, 8, 1), (9, 2**31 - 1, 0)]
    assert validate_and_normalize_dynamic_sd_schedule(ranges_of()) == ranges_of()


@pytest.mark.parametrize("ranges", [[[2, 4, 1]], [[1, 4, 1], [6, 8, 0]], [[1, 0, 1]], [[1, 4, 17]]])
def test_ranges_with_gaps_are_refused(ranges: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="ranges from 1 on without gaps"):
        Calibrated(device="cpu", num_speculative_tokens_per_batch_size=ranges)


def test_cut_off_is_vllms_schedule() -> None:
    config = chosen({"method": "cp", "disable_by_batch_size": 8, "num_speculative_tokens": 4})
    schedule = config.choice_of_drafts()["num_speculative_tokens_per_batch_size"]
    assert [entry[:1] + entry[2:] for entry in schedule] == [(1, 4), (9, 0)]
    assert chosen({"method": "cp", "disable_by_batch_size": 8, "runner": "v1"}).choice_of_drafts() == {}


def test_what_a_runner_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(config: Any, **given: Any) -> str:
        args = SimpleNamespace(**{**NOTHING, **given})
        with pytest.raises(OptionError) as error:
            refuse(of_scheduling(config, args))
        return str(error.value)

    on_v1, on_v2 = chosen({"method": "ppd", "exit_layer": [2, 4]}), chosen({"method": "cp"})
    assert refused(on_v1, async_scheduling=True).startswith(
        "--async-scheduling is not supported with runner V1 (several exit layers)"
    )
    refuse(of_scheduling(on_v2, SimpleNamespace(**{**NOTHING, "async_scheduling": True})))
    adaptive = chosen({"method": "cp", "adaptive": True})
    assert "whole-model CUDA graphs" in refused(adaptive)  # on this platform
    monkeypatch.setattr(platform, "is_cpu", lambda: False)
    assert "--enforce-eager" in refused(adaptive, enforce_eager=True)
    refuse(of_scheduling(adaptive, SimpleNamespace(**NOTHING)))


def test_vllm_asks_us(tiny_model: Callable[..., Path]) -> None:
    """Wherever vLLM asks which runner it has, the answer is ours; where we are not, it is vLLM's."""
    stock = VllmConfig()
    assert stock.use_v2_model_runner is False  # this CPU build has no Triton backend
    stock.speculative_config = SimpleNamespace(  # type: ignore[assignment]
        method="custom_class", parallel_drafting=False, use_heterogeneous_vocab=False
    )
    assert any("custom_class" in feature for feature in stock._get_v2_model_runner_unsupported_features())
    for runner in ("v1", "v2"):
        config = chosen({"method": "cp", "runner": runner})
        stock.additional_config = {CONFIG_KEY: config.model_dump_json()}
        assert stock.use_v2_model_runner is (runner == "v2")
        assert not stock._get_v2_model_runner_unsupported_features()


def test_asynchronous_scheduling_is_open_to_runner_v2() -> None:
    """vLLM 0.32 grants it a closed list of methods, which it reads while a configuration is completed."""
    import vllm.config.vllm as module

    stock, seen = module.NgramGPUTypes, []

    def completed(vllm_config: Any) -> None:
        start.complete_config(lambda self: seen.append("custom_class" in get_args(module.NgramGPUTypes)), vllm_config)

    for runner in (None, "v1", "v2"):
        config = None if runner is None else chosen({"method": "cp", "runner": runner}).model_dump_json()
        completed(SimpleNamespace(additional_config={} if config is None else {CONFIG_KEY: config}))
    assert seen == [False, False, True]
    assert module.NgramGPUTypes is stock


def test_parallel_schedule_warns_on_a_gpu(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(activation.logger, "warning", said.append)
    for schedule, on_cpu in (("parallel", True), ("deferred", False), ("parallel", False)):
        monkeypatch.setattr(platform, "is_cpu", lambda on_cpu=on_cpu: on_cpu)
        asked = {"method": "paradecode", "schedule": schedule}
        args = EngineArgs(model=str(tiny_model()), dtype="float32", speculative_config=asked)
        activation.activate(args, args.create_model_config(), ParallelConfig())
        assert bool(said) == (schedule == "parallel" and not on_cpu)
