# SPDX-License-Identifier: Apache-2.0
"""Resolution: exits, number of drafts and draft vocabulary where the user leaves them
open, and the worker.
"""

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
from vllm_ppd.vllm_plugins.config.options import CONFIG_KEY, parse_options
from vllm_ppd.vllm_plugins.config.resolve import CPU, Machine, resolve
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.registry import METHODS, WORKER

GROUP = METHODS["ppd"].group
assert GROUP is not None
GPU = Machine(on_cpu=False, device="NVIDIA H100")


def resolved(
    options: dict[str, Any], machine: Machine = CPU, stages: int = 1
) -> DraftingConfig:
    return resolve(parse_options(options), 12, None, stages, machine)


def test_workers() -> None:
    for machine in (CPU, GPU):
        assert resolved({"method": "cp"}, machine).worker == WORKER
        group = resolved({"method": "ppd"}, machine, stages=2)
        assert (group.worker, group.choice_of_drafts()) == (GROUP.worker, {})


def test_default_exit_is_the_middle_and_on_a_gpu_a_quarter() -> None:
    assert resolved({"method": "ppd"}).exit_layer == (6,)
    assert resolved({"method": "ppd"}, GPU).exit_layer == (3,)
    assert resolved({"method": "ppd", "exit_layer": 5}, GPU).exit_layer == (5,)
    assert resolved({"method": "ppd"}, GPU, stages=2).exit_layer == (6,)


@pytest.mark.parametrize(("num_layers", "split"), [(6, 3), (7, 4), (2, 1)])
def test_stages_of_a_worker_group_are_split_in_the_middle(
    num_layers: int, split: int
) -> None:
    config = resolve(parse_options({}), num_layers, stages=2)
    assert config.exit_layer == (split,)
    assert config.partition == f"{split},{num_layers - split}"
    assert config.disable_by_batch_size == 8


def test_worker_group(tiny_model: Factory, heads_folder: Factory) -> None:
    vllm_config = from_flags(
        tiny_model(),
        "--speculative-model ppd --pipeline-parallel-size 2 --ppd-candidates 4 "
        "--spec-tokens 7",
    )
    config = drafting(vllm_config)
    assert (config.stages, config.candidates, config.num_speculative_tokens) == (
        2,
        4,
        7,
    )
    assert vllm_config.scheduler_config.scheduler_cls == GROUP.scheduler
    assert vllm_config.num_lookahead_tokens == 1
    for part in (
        "worker group over 2 pipeline stages of 3 and 3 layers",
        "4 candidates",
        "8 micro-steps a",
        "above 8",
    ):
        assert part in config.summary()
    # Heads decide where the stages are split: the earliest exit from the middle on.
    given = {"model": str(heads_folder(exit_layers=(2, 4, 5)))}
    assert drafting(
        from_dict(tiny_model(), given, pipeline_parallel_size=2)
    ).exit_layer == (4,)


def test_adaptive_is_for_verified_drafts() -> None:
    assert resolved({}).adaptive
    assert "up to 3 drafts" in resolved({}).summary()
    for options, stages in (
        ({"adaptive": False}, 1),
        ({}, 2),
        ({"method": "dynamo", "verify": False}, 1),
    ):
        assert not resolved(options, stages=stages).adaptive


def test_vllm_captures_graphs_of_no_drafts_and_of_all() -> None:
    choice = resolved({"method": "cp"}).choice_of_drafts()
    assert {
        drafts for _, _, drafts in choice.pop("num_speculative_tokens_per_batch_size")
    } == {0, 3} and not choice
    assert resolved({"method": "cp", "adaptive": False}).choice_of_drafts() == {}


def test_drafts_by_batch_size_are_the_calibrations() -> None:
    """On the device that was measured, unless the user gives a number of drafts or an exit."""
    ranges = [[1, 4, 3], [5, 16, 1], [17, 2**31 - 1, 0]]
    measured = Calibrated(
        device="NVIDIA H100", num_speculative_tokens_per_batch_size=ranges
    )
    heads = CPConfig(
        verifier="m",
        positions=4,
        rank=2,
        num_speculative_tokens=3,
        calibration=measured,
        target=TargetLayers(
            model_type="llama", hidden_size=8, vocab_size=64, num_hidden_layers=12
        ),
    )

    def ranges_of(device: str = "NVIDIA H100", **given: Any) -> Any:
        options = parse_options(
            {"method": "cp", "model": "heads", "adaptive": False, **given}
        )
        config = resolve(options, 12, heads, machine=Machine(False, device))
        return config.choice_of_drafts().get("num_speculative_tokens_per_batch_size")

    assert ranges_of() == [tuple(part) for part in ranges]
    assert ranges_of("NVIDIA L4") is None
    assert ranges_of(num_speculative_tokens=2) is None
    assert ranges_of(disable_by_batch_size=8) == [
        (1, 4, 3),
        (5, 8, 1),
        (9, 2**31 - 1, 0),
    ]
    assert validate_and_normalize_dynamic_sd_schedule(ranges_of()) == ranges_of()


def test_cut_off_is_vllms_schedule() -> None:
    config = resolved(
        {
            "method": "cp",
            "disable_by_batch_size": 8,
            "num_speculative_tokens": 4,
            "adaptive": False,
        }
    )
    schedule = config.choice_of_drafts()["num_speculative_tokens_per_batch_size"]
    assert [entry[:1] + entry[2:] for entry in schedule] == [(1, 4), (9, 0)]


@pytest.mark.parametrize("kind", ["cp", "dynamo"])
def test_heads_recommend_a_draft_vocabulary(
    tiny_model: Factory, tmp_path: Path, kind: str
) -> None:
    folder = str(
        make_heads(tmp_path / "heads", kind, tiny_model(), draft_vocab_size=128)
    )
    for given, expected in (
        ({}, 128),
        ({"draft_vocab_size": 64}, 64),
        ({"draft_vocab_size": 320}, None),
    ):
        assert (
            drafting(
                from_dict(tiny_model(), {"model": folder, **given})
            ).draft_vocab_size
            == expected
        )
    if kind == "dynamo":  # unverified drafts are the output: all of the vocabulary
        assert (
            drafting(
                from_dict(tiny_model(), {"model": folder, "verify": False})
            ).draft_vocab_size
            is None
        )


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (
            DraftingConfig(
                exit_layer=(3,), num_layers=12, model="/heads", disable_by_batch_size=8
            ),
            (
                "method ppd",
                "exit layer 3 of 12",
                "heads /heads",
                "3 drafts",
                "batch cut-off: above 8 requests",
            ),
        ),
        (
            resolved({"prompt_lookup_min": 2, "exit_layer": 4}),
            ("prompt lookup from 2 tokens on", "batch cut-off: none"),
        ),
    ],
)
def test_summary_names_what_drafts(
    config: DraftingConfig, parts: tuple[str, ...]
) -> None:
    line = config.summary()
    assert (
        config.num_speculative_tokens == 3
        and "\n" not in line
        and all(part in line for part in parts)
    )


def test_vllm_asks_us_which_runner_it_has() -> None:
    """Where we are not, the answer is vLLM's."""
    vllm_config = VllmConfig()
    # This CPU build has no Triton backend
    assert vllm_config.use_v2_model_runner is False
    vllm_config.additional_config = {
        CONFIG_KEY: resolved({"method": "cp"}).model_dump_json()
    }
    assert vllm_config.use_v2_model_runner is True
