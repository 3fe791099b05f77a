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
    recorded = json.loads(touched.RECORD.read_text())[touched.version()]
    moved = {
        symbol: digest
        for symbol, digest in touched.now().items()
        if digest != recorded.get(symbol)
    }
    assert moved == {}
