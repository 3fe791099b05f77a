# SPDX-License-Identifier: Apache-2.0
"""Engines on runner V2, in Triton's interpreter: `PPD_TEST_V2=1 pytest tests/v2`, a process of its own."""

import os
from pathlib import Path
from typing import Any

import interpreted
import pytest
from conftest import DEMO, Factory, start_engine

ON_GPU = os.path.exists("/dev/nvidiactl")
if os.environ.get("PPD_TEST_V2") != "1":
    collect_ignore_glob = ["test_*.py"]
elif not ON_GPU:
    interpreted.prepare()
    interpreted.allow_asynchronous()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.v2)


@pytest.fixture(scope="session")
def v2_engine() -> Factory:
    """v2_engine(speculative_config, asynchronous, **settings) on the demo model; equal arguments, one engine.

    Drafts are made in every step unless the options say something else.
    """
    started: dict[str, Any] = {}

    def get(options: dict[str, Any] | None = None, asynchronous: bool = False, **settings: Any) -> Any:
        key = repr((options, asynchronous, sorted(settings.items())))
        if key not in started:
            interpreted.asynchronous = asynchronous
            if options is not None:
                options = {"runner": "v2", "adaptive": False, **options}
            defaults = {"max_num_seqs": 4, "async_scheduling": asynchronous if ON_GPU else None}
            started[key] = start_engine(DEMO, options, **{**defaults, **settings})
        return started[key]

    return get
