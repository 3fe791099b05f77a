# SPDX-License-Identifier: Apache-2.0
"""docs/adding-a-method.md: its fifth method drafts exactly, and is as short as the page
promises.
"""

import re
import sys
from types import ModuleType

import pytest
from cases import greedy
from conftest import ROOT, Factory

from vllm_ppd.vllm_plugins import methods
from vllm_ppd.vllm_plugins.registry import METHODS, MethodSpec

pytestmark = pytest.mark.engine
MODULE = "vllm_ppd.vllm_plugins.methods.repeat"


@pytest.fixture
def repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's two blocks of code, as a module and a record."""
    drafter, record = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "adding-a-method.md").read_text(), re.S
    )
    assert len((drafter + record).splitlines()) <= 60
    module = ModuleType(MODULE)
    exec(drafter, module.__dict__)
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(methods, "repeat", module, raising=False)
    monkeypatch.setitem(METHODS, "repeat", METHODS["cp"])  # taken back at the end
    exec(record, {"METHODS": METHODS, "MethodSpec": MethodSpec})


def test_the_example_drafts_exactly(repeat: None, engine: Factory) -> None:
    # Some of these requests go on with what was said before, so that repetition is
    # right at times.
    requests = [{"prompt_token_ids": [5 + i] * 20} for i in range(8)]
    llm = engine({"method": "repeat", "num_speculative_tokens": 2})
    texts = [
        [
            list(output.outputs[0].token_ids)
            for output in each.generate(requests, greedy(), use_tqdm=False)
        ]
        for each in (engine(), llm)
    ]
    assert texts[0] == texts[1]
    assert 0 < llm.counts["accepted"] < llm.counts["drafted"]
