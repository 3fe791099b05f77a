# SPDX-License-Identifier: Apache-2.0
"""An engine says so when hardly any draft is accepted; on runner V2: test_v2_metrics.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import generate, greedy, prompts

from vllm_ppd.vllm_plugins.drafting import acceptance_watch

pytestmark = pytest.mark.engine


def test_hardly_any_accepted_draft_is_a_warning(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, our_log: pytest.LogCaptureFixture
) -> None:
    llm = engine({"method": "ppd", "exit_layer": 5})
    monkeypatch.setattr(acceptance_watch, "WINDOW", 20)
    generate(llm, prompts(2, 30), greedy(30))
    assert not our_log.messages  # enough are accepted
    monkeypatch.setattr(acceptance_watch, "NEAR_ZERO", 1.1)
    before = llm.counts.copy()
    generate(llm, prompts(2, 30), greedy(30))
    counted = llm.counts - before
    assert counted["drafts"] > 20
    assert len(our_log.messages) == 1 and "drafted tokens were accepted over the last 2" in our_log.messages[0]
