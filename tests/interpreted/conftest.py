# SPDX-License-Identifier: Apache-2.0
"""Engines that run Triton kernels of ours: on a GPU, or in Triton's interpreter in a process of their own.

`PPD_TEST_V2=1 pytest tests/interpreted`; without the variable and a GPU these cases are left out.
"""

import os
from pathlib import Path

import interpreter
import pytest

INTERPRETED, ON_GPU = os.environ.get("PPD_TEST_V2") == "1", os.path.exists("/dev/nvidiactl")
if INTERPRETED and not ON_GPU:
    interpreter.prepare()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs the interpreter where there is none."""
    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in ours:
        item.add_marker(pytest.mark.interpreted)
    if ours and not (INTERPRETED or ON_GPU):
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]
