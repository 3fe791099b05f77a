# SPDX-License-Identifier: Apache-2.0
"""docs/adding-a-method.md: its fifth method drafts exactly, and is as short as the page
promises.
"""

import re
import sys
from types import ModuleType

import pytest
from cases import generate, greedy
from conftest import ROOT, Factory, counting

from vllm_ppd.vllm_plugins import methods
from vllm_ppd.vllm_plugins.registry import METHODS, MethodSpec

pytestmark = pytest.mark.engine
MODULE = "vllm_ppd.vllm_plugins.methods.repeat"


@pytest.fixture
def repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's two blocks of code, as a module and a record."""
    page = (ROOT / "docs" / "adding-a-method.md").read_text()
    drafter, record = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len((drafter + record).splitlines()) <= 60
    module = ModuleType(MODULE)
    exec(drafter, module.__dict__)
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(
        methods,
        "repeat",
        module,
        raising=False,
    )
    monkeypatch.setitem(METHODS, "repeat", METHODS["cp"])  # taken back at the end
    exec(record, {"METHODS": METHODS, "MethodSpec": MethodSpec})


def test_the_example_drafts_exactly(repeat: None, engine: Factory) -> None:
    # Some of these requests go on with what was said before, so that repetition is
    # right at times.
    requests = [{"prompt_token_ids": [5 + i] * 20} for i in range(8)]
    llm = engine({"method": "repeat", "num_speculative_tokens": 2})
    with counting(llm) as seen:
        assert generate(llm, requests, greedy()) == generate(
            engine(), requests, greedy()
        )
    assert 0 < seen["accepted"] < seen["drafted"]
