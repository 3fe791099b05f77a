# SPDX-License-Identifier: Apache-2.0
"""After hundreds of steps without drafts their acceptance is what it was: no state of a
method goes stale.
"""

from collections.abc import Callable
from typing import Any

import pytest
from cases import greedy, prompts
from conftest import DEMO, counting, full_but, start_engine

HEADS = DEMO.parent / "heads"
METHODS: dict[str, dict[str, Any]] = {
    "cp": {"method": "cp", "model": str(HEADS / "cp")},
    "early": {
        "method": "ppd",
        "model": str(HEADS / "early"),
        "exit_layer": 6,
        "num_speculative_tokens": 3,
    },
    "lookup": {"method": "ppd", "prompt_lookup_min": 2},
    "cp and lookup": {
        "method": "cp",
        "model": str(HEADS / "cp"),
        "prompt_lookup_min": 2,
    },
    "dynamo": {"method": "dynamo", "model": str(HEADS / "dynamo"), "eps_b": 0.05},
}
STEPS = 400
TOKENS = 500
LONG = {"max_model_len": 640}
Switch = Callable[[bool], None]  # switches drafting of an engine on or off


def accepted_late(llm: Any, params: Any, switch: Switch, drafting_early: bool) -> int:
    """Accepted drafts of a request's last tokens, those behind the first STEPS."""
    emitted = 0
    accepted = 0
    switch(drafting_early)
    llm.llm_engine.add_request("request", prompts(1)[0], params)
    while llm.llm_engine.has_unfinished_requests():
        if emitted >= STEPS:
            switch(True)
        with counting(llm) as seen:
            outputs = llm.llm_engine.step()
        accepted += seen["accepted"] if emitted >= STEPS else 0
        emitted = max(
            [emitted, *(len(output.outputs[0].token_ids) for output in outputs)]
        )
        if not drafting_early and emitted < STEPS:
            assert not seen["accepted"]
    return int(accepted)


@pytest.mark.engine
@pytest.mark.parametrize("name", full_but({"early"}, METHODS))
def test_acceptance_is_what_it_was(name: str) -> None:
    llm = start_engine(
        DEMO, {**METHODS[name], "disable_by_batch_size": 1}, max_num_seqs=2, **LONG
    )
    lookup = llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup
    drafts = lookup[1]
    # Greedy text ends in a loop, which the heads do not know and lookups do.
    params = greedy(TOKENS, temperature=0.0 if "lookup" in name else 0.8, seed=1)
    always, late = (
        accepted_late(
            llm,
            params,
            lambda on: lookup.__setitem__(1, drafts if on else 0),
            drafting_early,
        )
        for drafting_early in (True, False)
    )
    # A step may cross the border
    assert always > 10 and abs(always - late) <= 4, (
        always,
        late,
    )
