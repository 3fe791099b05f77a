# SPDX-License-Identifier: Apache-2.0
"""Quoted values: short, printable and on one line, whatever was given."""

from typing import Any

import pytest

from vllm_ppd.heads.quote import quoted, shortened


class Broken:
    def __repr__(self) -> str:
        raise KeyError


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, b"x" * 10**6, range(10**5), {i: i for i in range(10**5)}, nested(5000), 10**5000, Broken()],
    ids=type,
)
def test_quoted_values_are_short(value: Any) -> None:
    assert len(quoted(list(value) if isinstance(value, range) else value)) <= 80


def test_quoted_values_are_as_python_writes_them() -> None:
    assert quoted("a  b\n\ud800") == repr("a  b\n\ud800")
    assert quoted([1, "2", None, True, 0.5]) == "[1, '2', None, True, 0.5]"
    assert shortened("a \n b") == "a b"
    assert shortened("ab" * 100, 20) == "abababababa...ababab"
