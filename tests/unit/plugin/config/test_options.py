# SPDX-License-Identifier: Apache-2.0
"""Options as declared: spellings, bad values in one line, flags and the documented table."""

import argparse
from typing import Any

import pytest
from conftest import ROOT

from vllm_ppd.vllm_plugins.config.options import (
    DraftingOptions,
    OptionError,
    add_flags,
    flag_fields,
    flag_name,
    methods_of,
    parse_options,
)
from vllm_ppd.vllm_plugins.registry import METHODS


def test_exit_layers_are_spelt_in_several_forms() -> None:
    for value in (4, "4", [4], (4,), ["4", 4]):
        assert parse_options({"exit_layer": value}).exit_layer == (4,)
    assert parse_options({"exit_layer": "8, 4"}).exit_layer == (4, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exit_layr": 3}, "unknown option 'exit_layr'; did you mean 'exit_layer'"),
        ({"num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        (
            {"max_draft_len": 3},
            "unknown option 'max_draft_len'; did you mean 'num_speculative_tokens'",
        ),
        ({"max_batch_size": 3}, "did you mean 'disable_by_batch_size'"),
        ({"zzz": 3}, "unknown option 'zzz'; known options: method, model"),
        (
            {"num_speculative_tokens": 0},
            "num_speculative_tokens=0: Input should be greater than or equal to 1",
        ),
        ({"gamma": 1.5}, "gamma=1.5: Input should be less than 1"),
        ({"gamma": "much"}, "gamma='much'"),
        ({"exit_layer": 0}, "must be at least 1"),
        (
            {"max_drafting_requests": 2},
            "max_drafting_requests was removed: use disable_by_batch_size",
        ),
        (
            {"runner": "v1"},
            "runner was removed: leave it out; every method runs on vLLM's model "
            "runner V2",
        ),
        (
            {"schedule": "parallel"},
            "schedule was removed: leave it out; only the deferred schedule is left",
        ),
        (
            {"eps_b": 0.5},
            "eps_b is an option of method dynamo; leave it out with method 'ppd'",
        ),
        (
            {"method": "cp", "exit_layer": 3},
            "exit_layer is an option of method ppd and paradecode; leave it out",
        ),
        (
            {"method": "medusa"},
            "method='medusa': must be one of ppd, paradecode, cp, dynamo",
        ),
        (
            {"draft_sample_method": "beam"},
            "draft_sample_method='beam': Input should be 'greedy' or 'probabilistic'",
        ),
        (
            {"prompt_lookup_min": 33},
            "prompt_lookup_min=33: Input should be less than or equal to 32",
        ),
        *(
            ({"exit_layer": value}, "exit_layer=.*: must be a layer number")
            for value in (
                "three",
                2.5,
                [3, 4.5],
                [True, 6],
                True,
                {"4": 1},
                [[3]],
            )
        ),
        *(
            ({"num_speculative_tokens": value}, "Input should be a valid integer")
            for value in (True, 3.0, "3")
        ),
        *(
            ({"adaptive": value}, "Input should be a valid boolean")
            for value in (1, "false")
        ),
        ({"gamma": True}, "gamma=True: Input should be a valid number"),
        ({"gamma": float("nan")}, "gamma=nan: Input should be a finite number"),
        *(
            ({name: ["ppd"]}, rf"{name}=\['ppd'\]: Input should be a valid string")
            for name in ("method", "model")
        ),
        ({"gamma": "x" * 10**6}, r"x{50}\.\.\.x{20}"),
        ({"y" * 10**6: 1}, r"y{50}\.\.\.y{20}"),
        ({"exit_layer": ["z\n" * 10**5]}, r"z\\n"),
    ],
)
def test_bad_options_are_refused_in_a_short_line(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message) as refusal:
        parse_options({"method": "ppd", **given})
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) <= 300


def test_flags_are_added_once() -> None:
    parser = add_flags(argparse.ArgumentParser())
    text = parser.format_help()
    assert {flag_name(name) for name in flag_fields()} <= set(text.split())
    assert add_flags(parser).format_help() == text


def test_the_documented_table_is_that_of_the_options() -> None:
    lines = [
        "| option | flag | methods | default | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, field in DraftingOptions.model_fields.items():
        by_itself = field.default is None and "(default:" in (field.description or "")
        default = (
            "see there"
            if by_itself
            else "none"
            if field.default is None
            else field.default
        )
        methods = (
            "all" if methods_of(name) == list(METHODS) else ", ".join(methods_of(name))
        )
        lines.append(
            f"| `{name}` | `{flag_name(name)}` | {methods} | {default} | "
            f"{field.description} |"
        )
    assert "\n".join(lines) in (ROOT / "docs" / "serving.md").read_text()
