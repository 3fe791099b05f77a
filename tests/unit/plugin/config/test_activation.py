# SPDX-License-Identifier: Apache-2.0
"""Activation: every way of asking gives the same configuration, and vLLM's own methods
are left alone.
"""

import importlib.metadata
import logging
from pathlib import Path

from configured import drafting, from_dict, from_flags
from conftest import Factory, our_log

from vllm_ppd.vllm_plugins.config import activation
from vllm_ppd.vllm_plugins.registry import WORKER


def test_ways_of_asking_are_the_same(tiny_model: Factory) -> None:
    config = drafting(from_dict(tiny_model(), {"method": "ppd", "exit_layer": 3}))
    assert config.exit_layer == 3 and config.method == "early"
    assert drafting(from_dict(tiny_model(), {"method": "ppd"})).method == "lookup"
    for flags in (
        "--speculative-model ppd",
        "--spec-model early",
        "--spec-method paradecode",
        """-sc '{"method": "ppd"}'""",
        """--speculative-config '{"model": "ppd"}'""",
        "--speculative-config.method ppd",
    ):
        assert (
            drafting(from_flags(tiny_model(), f"{flags} --ppd-exit-layer 3"))
            == config
        )


def test_flags_carry_every_option(tiny_model: Factory) -> None:
    config = from_flags(
        tiny_model(),
        "--speculative-model paradecode --spec-tokens 5 --ppd-exit-layer 4 "
        "--ppd-gamma 0.4 --no-ppd-adaptive --ppd-draft-sample-method greedy "
        "--ppd-disable-by-batch-size 9 --ppd-prompt-lookup-min 4 --ppd-step-costs "
        "measure",
    )
    given = {
        "method": "early",
        "num_speculative_tokens": 5,
        "exit_layer": 4,
        "gamma": 0.4,
        "draft_sample_method": "greedy",
        "disable_by_batch_size": 9,
        "adaptive": False,
        "prompt_lookup_min": 4,
        "step_costs": "measure",
    }
    assert given.items() <= drafting(config).model_dump().items()
    assert config.speculative_config.num_speculative_tokens == 5
    assert config.num_lookahead_tokens == 6
    assert config.parallel_config.worker_cls == WORKER


def test_heads_folder_gives_method_and_defaults(
    tiny_model: Factory, heads_folder: Factory
) -> None:
    folder = str(heads_folder(exit_layers=(2, 4)))
    for vllm_config in (
        from_flags(tiny_model(), f"--speculative-model {folder}"),
        from_dict(tiny_model(), {"method": "ppd", "model": folder}),
        from_flags(
            Path(folder), ""
        ),  # `vllm serve HEADS`: the folder names its target
    ):
        config = drafting(vllm_config)
        assert (config.method, config.model) == ("early", folder)
        assert (config.exits, config.num_speculative_tokens) == ((2, 4), 2)
        assert vllm_config.model_config.model == str(tiny_model())
    config = drafting(from_dict(tiny_model(), {"model": folder, "exit_layer": 4}))
    assert config.exit_layer == 4


def test_the_same_value_twice_is_no_conflict(tiny_model: Factory) -> None:
    once = """-sc '{"method": "ppd", "num-speculative-tokens": 2}'"""
    config = drafting(from_flags(tiny_model(), once))
    assert config == drafting(
        from_flags(tiny_model(), f"{once} --spec-method ppd --spec-tokens 2")
    )
    assert config.num_speculative_tokens == 2


def test_start_up_lines_say_what_an_alias_means_and_the_version(
    tiny_model: Factory,
) -> None:
    """Reports of bugs quote these lines."""
    with our_log(logging.INFO) as told:
        from_dict(tiny_model(), {"method": "ppd", "exit_layer": 3})
        from_dict(tiny_model(), {"method": "early", "exit_layer": 3})
    alias, line, same = told
    assert alias == "vllm-ppd: method ppd resolved to early"
    assert line == same and "drafting with method early" in line
    assert line.endswith(f"; vllm-ppd {importlib.metadata.version('vllm-ppd')}")


def test_methods_of_vllm_keep_their_options(tiny_model: Factory) -> None:
    """Some of ours are called as vLLM's are."""
    lookup = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    config = from_dict(tiny_model(), lookup)
    assert activation.active_config(config) is None
    assert {
        name: getattr(config.speculative_config, name) for name in lookup
    } == lookup
