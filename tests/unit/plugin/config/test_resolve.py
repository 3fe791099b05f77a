# SPDX-License-Identifier: Apache-2.0
"""Resolution: exits, model runner, number of drafts and draft vocabulary where the user leaves them open."""

from pathlib import Path
from typing import Any

import pytest
from configured import drafting, from_dict, from_flags
from conftest import Factory
from heads_folders import make_heads
from vllm.config import VllmConfig
from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

from vllm_ppd.heads.base import Calibrated, TargetLayers
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.vllm_plugins.config.options import CONFIG_KEY, OptionError, parse_options
from vllm_ppd.vllm_plugins.config.resolve import Runners, resolve
from vllm_ppd.vllm_plugins.config.resolved import WORKERS, DraftingConfig
from vllm_ppd.vllm_plugins.methods.group import GROUP

GPU = Runners(None, "v2", True)
CPU_BUILD = Runners(None, "v1", True)
NO_TRITON = Runners(None, "v1", False)  # and no kernels of ours: not a CPU


def resolved(options: dict[str, Any], runners: Runners = GPU, stages: int = 1) -> DraftingConfig:
    return resolve(parse_options(options), 12, None, stages, runners)


def test_v2_where_vllm_takes_it() -> None:
    config = resolved({"method": "cp"})
    assert (config.runner, config.v1_because, config.worker) == ("v2", None, WORKERS["v2"])
    assert config.adaptive
    assert "runner V2" in config.summary()
    for runners in (CPU_BUILD, Runners("v1", "v2", True)):
        config = resolved({"method": "cp"}, runners)
        assert (config.runner, config.adaptive, config.worker) == ("v1", True, WORKERS["v1"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "paradecode", "schedule": "parallel"}, "schedule: parallel"),
        ({"method": "ppd", "exit_layer": [2, 4]}, "several exit layers"),
    ],
)
def test_v1_where_v2_cannot(options: dict[str, Any], reason: str) -> None:
    config = resolved(options)
    assert (config.runner, config.v1_because) == ("v1", reason)
    assert f"runner V1 ({reason})" in config.summary()
    with pytest.raises(OptionError, match=f"^VLLM_USE_V2_MODEL_RUNNER=1 is not supported with {reason}"):
        resolved(options, Runners("v2", "v2", True))
    with pytest.raises(OptionError, match=f"^runner=v2 is not supported with {reason}"):
        resolved({**options, "runner": "v2"}, GPU)


def test_a_worker_group_runs_on_v2() -> None:
    for runners in (GPU, CPU_BUILD):
        config = resolved({"method": "ppd"}, runners, stages=2)
        assert (config.runner, config.worker, config.choice_of_drafts()) == ("v2", GROUP.worker, {})
    reason = "is not supported with pipeline parallelism, which needs runner V2"
    with pytest.raises(OptionError, match=f"^VLLM_USE_V2_MODEL_RUNNER=0 {reason}"):
        resolved({"method": "ppd"}, Runners("v1", "v2", True), stages=2)
    with pytest.raises(OptionError, match=f"^runner=v1 {reason}"):
        resolved({"method": "ppd", "runner": "v1"}, CPU_BUILD, stages=2)


def test_the_option_goes_before_the_environment() -> None:
    assert resolved({"method": "cp", "runner": "v1"}, Runners("v2", "v2", True)).runner == "v1"
    assert resolved({"method": "cp", "runner": "v2"}, Runners("v1", "v2", True)).runner == "v2"
    with pytest.raises(OptionError, match=r"^runner=v2 needs Triton"):
        resolved({"method": "cp", "runner": "v2"}, NO_TRITON)
    assert resolved({"method": "cp", "runner": "v2"}, CPU_BUILD).runner == "v2"
    assert resolved({"method": "cp"}, CPU_BUILD).runner == "v1"


def test_default_exit_is_the_middle_and_on_a_gpu_a_quarter() -> None:
    assert resolved({"method": "ppd"}).exit_layer == (3,)
    assert resolved({"method": "ppd"}, CPU_BUILD).exit_layer == (6,)
    assert resolved({"method": "ppd", "exit_layer": 5}).exit_layer == (5,)
    assert resolved({"method": "ppd"}, stages=2).exit_layer == (6,)


@pytest.mark.parametrize(("num_layers", "split"), [(6, 3), (7, 4), (2, 1)])
def test_stages_of_a_worker_group_are_split_in_the_middle(num_layers: int, split: int) -> None:
    config = resolve(parse_options({}), num_layers, stages=2)
    assert config.exit_layer == (split,)
    assert config.partition == f"{split},{num_layers - split}"
    assert config.disable_by_batch_size == 8


def test_worker_group(tiny_model: Factory, heads_folder: Factory) -> None:
    vllm_config = from_flags(
        tiny_model(), "--speculative-model ppd --pipeline-parallel-size 2 --ppd-candidates 4 --spec-tokens 7"
    )
    config = drafting(vllm_config)
    assert (config.stages, config.candidates, config.num_speculative_tokens) == (2, 4, 7)
    assert vllm_config.scheduler_config.scheduler_cls == GROUP.scheduler
    assert vllm_config.num_lookahead_tokens == 1
    for part in ("worker group over 2 pipeline stages of 3 and 3 layers", "4 candidates", "8 micro-steps a", "above 8"):
        assert part in config.summary()
    # Heads decide where the stages are split: the earliest exit from the middle on.
    given = {"model": str(heads_folder(exit_layers=(2, 4, 5)))}
    assert drafting(from_dict(tiny_model(), given, pipeline_parallel_size=2)).exit_layer == (4,)


def test_adaptive_is_for_verified_drafts() -> None:
    assert resolved({}, CPU_BUILD).adaptive
    assert "up to 3 drafts" in resolved({}, CPU_BUILD).summary()
    for options, stages in (({"adaptive": False}, 1), ({}, 2), ({"method": "dynamo", "verify": False}, 1)):
        assert not resolved(options, CPU_BUILD, stages).adaptive


def test_on_v2_vllm_captures_graphs_of_no_drafts_and_of_all() -> None:
    choice = resolved({"method": "cp"}).choice_of_drafts()
    assert {drafts for _, _, drafts in choice.pop("num_speculative_tokens_per_batch_size")} == {0, 3} and not choice
    assert resolved({"method": "cp", "adaptive": False}).choice_of_drafts() == {}
    verification = resolved({"method": "cp", "adaptive_verification": True})
    assert not verification.adaptive
    assert verification.choice_of_drafts() == {"enable_adaptive_verification": True}
    assert resolved({"method": "cp", "runner": "v1"}).choice_of_drafts() == {}


def test_drafts_by_batch_size_are_the_calibrations() -> None:
    """On the device that was measured, unless the user gives a number of drafts or an exit."""
    ranges = [[1, 4, 3], [5, 16, 1], [17, 2**31 - 1, 0]]
    measured = Calibrated(device="NVIDIA H100", num_speculative_tokens_per_batch_size=ranges)
    heads = CPConfig(
        verifier="m", positions=4, rank=2, num_speculative_tokens=3, calibration=measured,
        target=TargetLayers(model_type="llama", hidden_size=8, vocab_size=64, num_hidden_layers=12),
    )  # fmt: skip

    def ranges_of(device: str = "NVIDIA H100", **given: Any) -> Any:
        options = parse_options({"method": "cp", "model": "heads", "adaptive": False, **given})
        config = resolve(options, 12, heads, 1, GPU._replace(device=device))
        return config.choice_of_drafts().get("num_speculative_tokens_per_batch_size")

    assert ranges_of() == [tuple(part) for part in ranges]
    assert ranges_of("NVIDIA L4") is None
    assert ranges_of(num_speculative_tokens=2) is None
    assert ranges_of(runner="v1") is None
    assert ranges_of(disable_by_batch_size=8) == [(1, 4, 3), (5, 8, 1), (9, 2**31 - 1, 0)]
    assert validate_and_normalize_dynamic_sd_schedule(ranges_of()) == ranges_of()


def test_a_soft_cut_off_is_v1s() -> None:
    with pytest.raises(OptionError, match=r"^max_drafting_requests=3 has no effect with runner V2"):
        resolved({"method": "cp", "max_drafting_requests": 3})
    assert resolved({"method": "cp", "max_drafting_requests": 3, "runner": "v1"}).max_drafting_requests == 3


def test_cut_off_is_vllms_schedule() -> None:
    config = resolved({"method": "cp", "disable_by_batch_size": 8, "num_speculative_tokens": 4, "adaptive": False})
    schedule = config.choice_of_drafts()["num_speculative_tokens_per_batch_size"]
    assert [entry[:1] + entry[2:] for entry in schedule] == [(1, 4), (9, 0)]
    assert resolved({"method": "cp", "disable_by_batch_size": 8, "runner": "v1"}).choice_of_drafts() == {}


@pytest.mark.parametrize("kind", ["cp", "dynamo"])
def test_heads_recommend_a_draft_vocabulary(tiny_model: Factory, tmp_path: Path, kind: str) -> None:
    folder = str(make_heads(tmp_path / "heads", kind, tiny_model(), draft_vocab_size=128))
    for given, expected in (({}, 128), ({"draft_vocab_size": 64}, 64), ({"draft_vocab_size": 320}, None)):
        assert drafting(from_dict(tiny_model(), {"model": folder, **given})).draft_vocab_size == expected
    if kind == "dynamo":  # unverified drafts are the output: all of the vocabulary
        assert drafting(from_dict(tiny_model(), {"model": folder, "verify": False})).draft_vocab_size is None


def test_the_parallel_schedule_has_another_proposer(tiny_model: Factory) -> None:
    config = drafting(from_dict(tiny_model(), {"method": "paradecode", "schedule": "parallel"}))
    assert config.proposer.endswith("ParallelProposer")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (
            DraftingConfig(exit_layer=(3,), num_layers=12, model="/heads", max_drafting_requests=8),
            ("method ppd", "exit layer 3 of 12", "heads /heads", "3 drafts", "soft first 8 requests", "hard none"),
        ),
        (resolved({"prompt_lookup_min": 2}, CPU_BUILD), ("prompt lookup from 2 tokens on",)),
        (resolved({"method": "paradecode", "schedule": "parallel"}, CPU_BUILD), ("gamma 0, parallel schedule",)),
    ],
)
def test_summary_names_what_drafts(config: DraftingConfig, parts: tuple[str, ...]) -> None:
    line = config.summary()
    assert config.num_speculative_tokens == 3 and "\n" not in line and all(part in line for part in parts)


def test_vllm_asks_us_which_runner_it_has() -> None:
    """Where we are not, the answer is vLLM's."""
    vllm_config = VllmConfig()
    assert vllm_config.use_v2_model_runner is False  # this CPU build has no Triton backend
    for runner in ("v1", "v2"):
        config = resolved({"method": "cp", "runner": runner})
        vllm_config.additional_config = {CONFIG_KEY: config.model_dump_json()}
        assert vllm_config.use_v2_model_runner is (runner == "v2")
