# SPDX-License-Identifier: Apache-2.0
"""Options of a single request: values, refusals, and misspelt keys."""

from typing import Any

import pytest

from vllm_ppd.vllm_plugins.config.request_options import (
    back_off_threshold,
    check_names,
    drafting_allowed,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, False),
        (1, True),
        (False, False),
        (True, True),
        ("false", False),
        ("True", True),
    ],
)
def test_switch_values(value: Any, expected: bool) -> None:
    assert drafting_allowed({"ppd_draft": value}) is expected


def test_switch_absent_and_bad() -> None:
    assert drafting_allowed(None)
    assert drafting_allowed({"other": 0})
    for bad in ("maybe", "", "0", 2, 0.5, 1.0, [0], [], None, {}, "x" * 10**6):
        with pytest.raises(
            ValueError, match=r"vllm_xargs\['ppd_draft'\].* is not a boolean; use true"
        ) as caught:
            drafting_allowed({"ppd_draft": bad})
        assert len(str(caught.value)) < 200


def test_back_off_of_a_request() -> None:
    for value in (0, 1, 0.25, 1.0):
        assert back_off_threshold({"ppd_eps_b": value}) == value
    for bad in (
        True,
        False,
        "0.5",
        [0.5],
        None,
        -0.1,
        1.5,
        float("nan"),
        float("inf"),
        10**400,
        "x" * 10**6,
    ):
        with pytest.raises(
            ValueError, match=r"vllm_xargs\['ppd_eps_b'\].* is not a number from 0 to 1"
        ) as caught:
            back_off_threshold({"ppd_eps_b": bad})
        assert len(str(caught.value)) < 200


def test_misspelt_request_options() -> None:
    check_names(None)
    check_names(
        {
            "ppd_draft": 1,
            "ppd_eps_b": 1,
            "session_id": "a",
            "draft": 1,
            "kv_transfer_params": {},
            3: 4,
        }
    )
    for key, near in {
        "ppd_drafts": "ppd_draft",
        "PPD_DRAFT": "ppd_draft",
        "Ppd_Draft": "ppd_draft",
        "ppd-draft": "ppd_draft",
        "ppddraft": "ppd_draft",
        " ppd_draft": "ppd_draft",
        "pdd_draft": "ppd_draft",
        "ppd_eps": "ppd_eps_b",
        "PPD_EPS_B": "ppd_eps_b",
        "ppd_" + "eps_b" * 10**5: "ppd_eps_b",
        "ppd_zzz": "ppd_",
    }.items():
        with pytest.raises(
            ValueError, match=f"vllm_xargs has no key .*; did you mean '{near}"
        ) as caught:
            check_names({key: False})
        assert len(str(caught.value)) < 200
