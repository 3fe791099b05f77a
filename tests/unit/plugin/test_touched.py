# SPDX-License-Identifier: Apache-2.0
"""The source of vLLM that this package leans on is what it was when the package was
tried with it.
"""

import ast
import json

import touched

from vllm_ppd.vllm_plugins import register

register()


def test_nothing_moved() -> None:
    """Where this fails, look at what vLLM changed, mend what it breaks, then `python
    tests/touched.py --record`.
    """
    recorded = json.loads(touched.RECORD.read_text())
    assert touched.version() in recorded, (
        f"vLLM {touched.version()} has not been recorded"
    )
    assert touched.moved(recorded[touched.version()], touched.now()) == []


def test_what_moved_is_named() -> None:
    installed = touched.now()
    assert len(installed) > 90
    patch = sorted(touched.wrapped())[0]
    override = sorted(touched.overridden())[0]
    other = {**installed, patch: "0", override: "gone"}
    recorded = {
        symbol: value
        for symbol, value in installed.items()
        if symbol != touched.ASSUMED[0]
    }
    assert touched.moved(recorded, other) == [
        f"{override} is gone",
        f"{touched.ASSUMED[0]} is not recorded",
        f"{patch} has changed",
    ]


def test_comments_are_not_code() -> None:
    """Prose may change, code may not."""
    code = "def plain(x):\n    {}return x + {}  # {}"
    plain, explained, other = (
        touched.digest_of_code(ast.parse(code.format(*parts)))
        for parts in (
            ("", 1, ""),
            ('"""What it does."""\n    ', 1, "and why"),
            ("", 2, ""),
        )
    )
    assert plain == explained != other
    assert touched.digest("vllm.nowhere:nothing") == "gone"
