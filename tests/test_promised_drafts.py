# SPDX-License-Identifier: Apache-2.0
"""What drafts promise to requests that lack what drafts need: whether it is worth making up for."""

from __future__ import annotations

import numpy as np
from test_adaptive import MOST, Simulation, shallow


def test_requests_of_a_pause_that_lack_what_drafts_need_may_get_it_if_they_promise_to_pay() -> None:
    """What they lack is told by `wanted`; once they have it, they need not wait for a trial."""
    for kind, pays in ((0, False), (1, True)):
        engine = Simulation(shallow(0.1), noise=0.02)
        engine.run(400, 0.1)
        adaptive, kinds, free = engine.adaptive, np.array([kind]), np.zeros(1, dtype=bool)
        adaptive._last_drafted = adaptive._steps  # no trial is due
        assert adaptive.promised is None and adaptive.resting
        adaptive.observe(["new"], np.array([1]), engine.now, False)
        nothing, most = np.zeros(1, dtype=np.int64), np.array([MOST])
        assert not adaptive.choose(nothing, 1, kinds, free, most).any()
        assert (adaptive.promised is not None) == pays
        assert adaptive.promised is None or 1.25 < adaptive.promised < np.inf
        for _ in range(20):
            adaptive.observe(["new"], np.array([1]), engine.now, True)
            assert not adaptive.choose(nothing, 1, kinds, free, most).any()
        adaptive.observe(["new"], np.array([1]), engine.now, True)
        assert adaptive.choose(most, 1, kinds, free).any() == pays and (adaptive.promised is not None) == pays


def test_drafts_of_a_kind_that_nobody_tried_need_not_promise_as_much() -> None:
    """A pause that others' drafts brought about would keep these from ever being tried by requests that are short."""
    for tried in (False, True):
        engine = Simulation(shallow(0.25), noise=0.02)
        engine.run(400, 0.0)
        adaptive, kinds, free = engine.adaptive, np.array([1]), np.zeros(1, dtype=bool)
        adaptive._last_drafted = adaptive._steps  # no trial is due
        if tried:
            adaptive.acceptance._tried_at[1] = adaptive._steps
        adaptive.observe(["new"], np.array([1]), engine.now, False)
        adaptive.choose(np.array([0]), 1, kinds, free, np.array([MOST]))
        assert adaptive.promised is None if tried else 1.05 <= adaptive.promised < 1.25
        adaptive.observe(["new"], np.array([1]), engine.now, True)
        assert adaptive.choose(np.array([MOST]), 1, kinds, free).any() != tried


def test_requests_of_a_batch_size_that_was_not_timed_promise_less() -> None:
    """What they lack is dear, and so may their drafts be."""
    promised = []
    for requests in (1, 16):
        engine = Simulation(shallow(0.1), noise=0.02)
        engine.run(400, 0.1)
        adaptive, free = engine.adaptive, np.zeros(requests, dtype=bool)
        nothing, kinds = np.zeros(requests, dtype=np.int64), np.ones(requests, dtype=np.int64)
        adaptive.observe([f"new {i}" for i in range(requests)], nothing + 1, engine.now, False)
        adaptive.choose(nothing, requests, kinds, free, nothing + MOST)
        promised.append(adaptive.promised)
    assert promised[0] is not None and promised[1] is None


def test_what_only_some_promise_is_no_longer_waited_for_once_all_can_draft() -> None:
    engine = Simulation(shallow(0.1), noise=0.02)
    engine.run(400, 0.1)
    adaptive, kinds, free = engine.adaptive, np.array([1]), np.zeros(1, dtype=bool)
    adaptive.observe(["new"], np.array([1]), engine.now, False)
    adaptive.choose(np.array([0]), 1, kinds, free, np.array([MOST]))
    assert adaptive.promised is not None
    adaptive.acceptance._server_hits[:] = 0  # others of its kind were verified meanwhile
    adaptive._last_drafted = adaptive._steps  # no trial is due
    adaptive.observe(["new"], np.array([1]), engine.now, True)
    assert not adaptive.choose(np.array([MOST]), 1, kinds, free).any() and adaptive.promised is None


def test_what_requests_lack_while_drafts_pay_is_promised_by_their_own_kind() -> None:
    """Nobody can draft, so nothing that only drafts need is computed until they have it; it is no pause."""
    for rate, pays in ((0.02, False), (0.9, True)):
        engine = Simulation(shallow(0.1), noise=0.02)
        engine.run(400, 0.9)
        adaptive, kinds, free = engine.adaptive, np.array([1]), np.zeros(1, dtype=bool)
        adaptive.acceptance._server_hits[1] = rate * adaptive.acceptance._server_trials[1]
        assert not adaptive.resting and adaptive.promised > 2
        adaptive.observe(["new"], np.array([1]), engine.now, False)
        assert not adaptive.choose(np.array([0]), 1, kinds, free, np.array([MOST])).any()
        assert adaptive.resting and not adaptive.lasting
        assert (adaptive.promised is not None) == pays
        adaptive.observe(["new"], np.array([1]), engine.now, True)
        assert adaptive.choose(np.array([MOST]), 1, kinds, free).any() == pays and adaptive.resting != pays


def test_requests_of_a_pause_that_are_about_to_end_promise_nothing() -> None:
    engine = Simulation(shallow(0.1), noise=0.02)
    engine.run(400, 0.1)
    nothing = np.zeros(1, dtype=np.int64)
    engine.adaptive.observe(["new"], np.array([1]), engine.now, False)
    assert not engine.adaptive.choose(nothing, 1, np.array([1]), nothing > 0, nothing).any()
    assert engine.adaptive.promised is None
