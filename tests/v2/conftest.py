# SPDX-License-Identifier: Apache-2.0
"""Engines on runner V2: with our kernels on a CPU, with vLLM's on a GPU.

Cases marked `interpreted` run Triton kernels of ours as well. On a CPU all kernels run in Triton's
interpreter then, in a process of their own: `PPD_TEST_V2=1 pytest tests/v2 -m interpreted`.
"""

import os
from pathlib import Path
from typing import Any

import interpreted
import pytest
from conftest import DEMO, Factory, start_engine

ON_GPU = os.path.exists("/dev/nvidiactl")
INTERPRETED = os.environ.get("PPD_TEST_V2") == "1" and not ON_GPU
if INTERPRETED:
    interpreted.prepare()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases, and leave out those that need the interpreter where there is none."""
    left_out = []
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.v2)
            if item.get_closest_marker("interpreted") and not (INTERPRETED or ON_GPU):
                left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def v2_engine() -> Factory:
    """v2_engine(speculative_config, asynchronous, **settings) on the demo model; equal arguments, one engine.

    Drafts are made in every step unless the options say something else. Without options it is vLLM alone.
    """
    started: dict[str, Any] = {}

    def get(options: dict[str, Any] | None = None, asynchronous: bool = False, **settings: Any) -> Any:
        key = repr((options, asynchronous, sorted(settings.items())))
        if key not in started:
            settings = {"max_num_seqs": 4, "async_scheduling": asynchronous, **settings}
            started[key] = start_engine(DEMO, options, on_v2=options is None, **settings)
        return started[key]

    return get
