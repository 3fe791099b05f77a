# SPDX-License-Identifier: Apache-2.0
"""An engine says so when hardly any draft is accepted; on runner V2: test_v2_metrics.py."""

from __future__ import annotations

import pytest
from cases import generate, greedy, prompts
from conftest import Factory, counting, our_log

from vllm_ppd.vllm_plugins.drafting import acceptance_watch

pytestmark = pytest.mark.engine


def test_hardly_any_accepted_draft_is_a_warning(engine: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine({"method": "ppd", "exit_layer": 5})
    monkeypatch.setattr(acceptance_watch, "WINDOW", 20)
    with our_log() as messages:
        generate(llm, prompts(2, 30), greedy(30))
        assert not messages  # enough are accepted
        monkeypatch.setattr(acceptance_watch, "NEAR_ZERO", 1.1)
        with counting(llm) as seen:
            generate(llm, prompts(2, 30), greedy(30))
        assert seen["drafts"] > 20
    assert len(messages) == 1 and "drafted tokens were accepted over the last 2" in messages[0]
