# SPDX-License-Identifier: Apache-2.0
"""Options as declared: bad values in one line, and the documented table."""

from typing import Any

import pytest
from conftest import ROOT

from vllm_ppd.vllm_plugins.config.options import (
    DraftingOptions,
    OptionError,
    flag_name,
    methods_of,
    parse_options,
)
from vllm_ppd.vllm_plugins.registry import names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"exit_layr": 3},
            "unknown option 'exit_layr'; did you mean 'exit_layer'",
        ),
        ({"zzz": 3}, "unknown option 'zzz'; known options: method, model"),
        *(
            ({"exit_layer": layers}, "exit_layer=.*: must be a layer from 1 on")
            for layers in (
                0,
                [],
                [4, 2],
                [2, 2],
                [0, 2],
                [2, "x"],
                True,
                3.0,
                "x",
            )
        ),
        ({"gamma": 1.5}, "gamma=1.5: must be less than 1"),
        ({"gamma": float("nan")}, "gamma=nan: must be a finite number"),
        ({"gamma": True}, "gamma=True: must be a valid number"),
        ({"num_speculative_tokens": 3.0}, "must be a valid integer"),
        ({"adaptive": 1}, "must be a valid boolean"),
        (
            {"eps_b": 0.5},
            "an option of method dynamo; remove it with method 'early'",
        ),
        (
            {"method": "medusa"},
            "method='medusa': must be one of early, lookup, group, cp, dynamo",
        ),
        (
            {"draft_sample_method": "beam"},
            "must be 'greedy' or 'probabilistic'",
        ),
        ({"gamma": "x\n" * 10**6}, r"x\\nx"),
        ({"y" * 10**6: 1}, r"y{50}\.\.\.y{20}"),
    ],
)
def test_bad_options_are_refused_in_a_short_line(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message) as refusal:
        parse_options({"method": "early", **given})
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) <= 300


def test_the_documented_table_is_that_of_the_options() -> None:
    lines = []
    for name, field in DraftingOptions.model_fields.items():
        default = "none" if field.default is None else field.default
        if field.default is None and "(default:" in str(field.description):
            default = "see there"
        methods = ", ".join(methods_of(name))
        if methods == ", ".join(names()):
            methods = "all"
        cells = [
            f"`{name}`",
            f"`{flag_name(name)}`",
            methods,
            default,
            field.description,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    assert "\n".join(lines) in (ROOT / "docs" / "serving.md").read_text()
