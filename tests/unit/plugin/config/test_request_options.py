# SPDX-License-Identifier: Apache-2.0
"""Options of a single request: values, refusals, and misspelt keys."""

from typing import Any

import pytest

from vllm_ppd.vllm_plugins.config.request_options import (
    check_names,
    request_options,
)


def test_values() -> None:
    assert request_options(None).ppd_draft
    assert request_options({"other": 0}).ppd_draft
    for value, expected in (
        (0, False),
        (1, True),
        ("false", False),
        ("True", True),
    ):
        assert request_options({"ppd_draft": value}).ppd_draft is expected
    for own, draft, most in (
        (None, 1, 3),
        (2, 1, 2),
        (7, 1, 3),
        (0, 1, 0),
        (2, 0, 0),
    ):
        options = {"ppd_num_drafts": own, "ppd_draft": draft}
        assert request_options(options).most_drafts(3) == most
    for threshold in (0, 1, 0.25):
        assert request_options({"ppd_eps_b": threshold}).ppd_eps_b == threshold


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("ppd_draft", value) for value in ("maybe", 2, 0.5, [0], "x" * 10**6)),
        *(("ppd_num_drafts", value) for value in (-1, 1.5, "2", True)),
        *(
            ("ppd_eps_b", value)
            for value in (True, "0.5", -0.1, float("nan"), 10**400)
        ),
    ],
)
def test_bad_values_are_refused_in_a_short_line(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^vllm_xargs\['{key}'\]=") as caught:
        request_options({key: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("PPD_DRAFT", "ppd_draft"),
        (" ppd_draft", "ppd_draft"),
        ("pdd_draft", "ppd_draft"),
        ("ppd_eps", "ppd_eps_b"),
        ("ppd_" + "eps_b" * 10**5, "ppd_eps_b"),
        ("ppd_zzz", "ppd_"),
    ],
)
def test_misspelt_keys(key: str, near: str) -> None:
    with pytest.raises(
        ValueError, match=f"no key .*; did you mean '{near}"
    ) as caught:
        check_names({key: False})
    assert len(str(caught.value)) < 200


def test_other_keys_are_not_ours() -> None:
    check_names(
        {"ppd_draft": 1, "ppd_eps_b": 1, "draft": 1, "session_id": "a", 3: 4}
    )
