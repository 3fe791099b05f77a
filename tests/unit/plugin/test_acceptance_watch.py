# SPDX-License-Identifier: Apache-2.0
"""The warning where hardly any draft is accepted."""

import logging

import pytest

from vllm_ppd.vllm_plugins.draft_length.acceptance import AcceptanceWatch


def test_watch_warns_once_and_again_after_recovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = AcceptanceWatch()
    with caplog.at_level(logging.WARNING, logger="vllm.vllm_ppd"):
        watch.observe(999, 3, 0)
        assert not caplog.messages
        for _ in range(4):
            watch.observe(500, 3, 0)
        assert len(caplog.messages) == 1
        watch.observe(1000, 3, 1000)
        watch.observe(1000, 3, 0)
        assert len(caplog.messages) == 2
