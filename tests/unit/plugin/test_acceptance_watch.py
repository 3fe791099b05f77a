# SPDX-License-Identifier: Apache-2.0
"""The warning where hardly any draft is accepted."""

import logging

import pytest

from vllm_ppd.vllm_plugins.patches.statistics import AcceptanceWatch


def test_watch_warns_once_and_again_after_recovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = AcceptanceWatch()
    with caplog.at_level(logging.WARNING, logger="vllm.vllm_ppd"):
        for _ in range(999):
            watch.observe(3, 0)
        assert not caplog.messages
        for _ in range(2001):
            watch.observe(3, 0)
        assert len(caplog.messages) == 1
        assert (
            "0 of 3000 drafted tokens were accepted over the last 1000 drafts"
            in caplog.messages[0]
        )
        for _ in range(1000):
            watch.observe(3, 2)
        for _ in range(1000):
            watch.observe(3, 0)
        assert len(caplog.messages) == 2
