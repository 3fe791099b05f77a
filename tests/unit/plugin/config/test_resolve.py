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
from vllm.v1.spec_decode.dynamic.utils import (
    validate_and_normalize_dynamic_sd_schedule,
)

from vllm_ppd.vllm_plugins.config.options import parse_options
from vllm_ppd.vllm_plugins.config.resolve import resolve
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.draft_length.measure import counts_of
from vllm_ppd.vllm_plugins.registry import METHODS

GROUP = {"method": "group"}


def resolved(
    options: dict[str, Any], num_layers: int = 12, **machine: Any
) -> DraftingConfig:
    return resolve(parse_options(options), num_layers, **machine)


def test_default_exit_is_the_middle_and_on_a_gpu_a_quarter() -> None:
    early = {"method": "early"}
    assert resolved(early).exit_layer == 6
    assert resolved(early, on_cpu=False).exit_layer == 3
    assert resolved(early | {"exit_layer": 5}, on_cpu=False).exit_layer == 5
    assert resolved(GROUP, on_cpu=False).exit_layer == 6


def test_several_exits(tiny_model: Factory) -> None:
    flags = "--speculative-model ppd --ppd-exit-layer"
    config = drafting(from_flags(tiny_model(), f"{flags} 2,4"))
    assert (config.exit_layer, config.exits) == ([2, 4], (2, 4))
    assert "exit layer 2 or 4 of 6" in config.summary()
    assert drafting(from_flags(tiny_model(), f"{flags} 4")).exits == (4,)
    assert resolved({"method": "early", "exit_layer": [4]}).exit_layer == 4
    assert resolved({"method": "cp"}).exits == ()


def test_heads_recommend_exits_among_which_the_policy_chooses(
    tiny_model: Factory, tmp_path: Path
) -> None:
    folder = make_heads(
        tmp_path / "heads", "early", tiny_model(), default_exit_layers=[4, 2]
    )
    given = {"model": str(folder)}
    assert drafting(from_dict(tiny_model(), given)).exits == (2, 4)
    alone = given | {"adaptive": False}
    assert drafting(from_dict(tiny_model(), alone)).exits == (4,)


@pytest.mark.parametrize(("num_layers", "split"), [(6, 3), (7, 4), (2, 1)])
def test_stages_of_a_worker_group_are_split_in_the_middle(
    num_layers: int, split: int
) -> None:
    config = resolved(GROUP, num_layers)
    assert config.partition == f"{split},{num_layers - split}"
    assert config.disable_by_batch_size == 8


def test_worker_group(tiny_model: Factory, heads_folder: Factory) -> None:
    vllm_config = from_flags(
        tiny_model(),
        "--speculative-model ppd --pipeline-parallel-size 2 --ppd-candidates 4",
    )
    config = drafting(vllm_config)
    assert config.candidates == 4 and config.choice_of_drafts() == {}
    group = METHODS["group"]
    assert vllm_config.parallel_config.worker_cls == group.worker
    assert vllm_config.scheduler_config.scheduler_cls == group.scheduler
    assert vllm_config.num_lookahead_tokens == 1
    for part in ("stages of 3 and 3 layers", "4 candidates", "4 micro-steps a"):
        assert part in config.summary()
    # Heads decide where the stages are split: the earliest exit from the middle on.
    given = {"model": str(heads_folder(exit_layers=(2, 4, 5)))}
    vllm_config = from_dict(tiny_model(), given, pipeline_parallel_size=2)
    assert drafting(vllm_config).exit_layer == 4


def test_adaptive_is_for_verified_drafts() -> None:
    config = resolved({"method": "cp"})
    assert config.adaptive and "up to 3 drafts" in config.summary()
    assert not resolved({"method": "cp", "adaptive": False}).adaptive
    assert not resolved(GROUP).adaptive
    assert not resolved({"method": "dynamo", "verify": False}).adaptive


def test_choice_of_drafts_is_a_schedule_of_vllm() -> None:
    """It has graphs of no drafts, which a step may need in any case, and of all; of more
    than three also of half.
    """
    for options, counts in (
        ({}, {0, 3}),
        ({"num_speculative_tokens": 7}, {0, 3, 7}),
        ({"adaptive": False}, {0, 3}),
    ):
        config = resolved({"method": "cp", **options})
        (ranges,) = config.choice_of_drafts().values()
        assert validate_and_normalize_dynamic_sd_schedule(ranges) == ranges
        assert {drafts for _, _, drafts in ranges} == counts
        assert set(counts_of(max(counts), "cuda")) == counts


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 128),
        ({"draft_vocab_size": 64}, 64),
        ({"draft_vocab_size": 320}, None),
        # Unverified drafts are the output: all of the vocabulary
        ({"verify": False}, None),
    ],
)
def test_heads_recommend_a_draft_vocabulary(
    tiny_model: Factory,
    tmp_path: Path,
    given: dict[str, Any],
    expected: int | None,
) -> None:
    folder = make_heads(
        tmp_path / "heads", "dynamo", tiny_model(), draft_vocab_size=128
    )
    config = drafting(from_dict(tiny_model(), {"model": str(folder), **given}))
    assert config.draft_vocab_size == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "cp"}, 2),
        ({"method": "early", "exit_layer": 4}, 2),
        ({"method": "lookup"}, 2),
        ({"method": "cp", "prompt_lookup_min": 0}, 0),
        ({"method": "dynamo", "verify": False}, None),
        (GROUP, None),
    ],
)
def test_lookups_are_the_default_where_drafts_are_verified(
    given: dict[str, Any], expected: int | None
) -> None:
    config = resolved(given)
    assert config.prompt_lookup_min == expected
    assert ("lookup from" in config.summary()) == bool(expected)
