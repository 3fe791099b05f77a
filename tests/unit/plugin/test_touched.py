# SPDX-License-Identifier: Apache-2.0
"""The source of vLLM that this package leans on is what it was when the package was
tried with it.
"""

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
    installed = {"vllm:a": "1", "vllm:b": "2", "vllm:c": "gone", "vllm:d": "gone"}
    recorded = {"vllm:a": "0", "vllm:c": "3", "vllm:d": "gone"}
    assert touched.moved(recorded, installed) == [
        "vllm:a has changed",
        "vllm:b is not recorded",
        "vllm:c is gone",
    ]
