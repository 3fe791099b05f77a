# SPDX-License-Identifier: Apache-2.0
"""After hundreds of steps without drafts their acceptance is what it was: no state of a
method goes stale.
"""

from typing import Any

import pytest
from cases import greedy, prompts
from conftest import DEMO, counting, full_but, start_engine

HEADS = str(DEMO.parent / "heads")
CP = {"method": "cp", "model": f"{HEADS}/cp"}
EARLY = {"method": "ppd", "model": f"{HEADS}/early", "num_speculative_tokens": 3}
LOOKUP = {"prompt_lookup_min": 2}
METHODS: dict[str, dict[str, Any]] = {
    "cp": CP,
    "early": EARLY | {"exit_layer": 6},
    "lookup": LOOKUP | {"method": "lookup"},
    "cp and lookup": CP | LOOKUP,
    "dynamo": {"method": "dynamo", "model": f"{HEADS}/dynamo", "eps_b": 0.05},
}
STEPS = 400
TOKENS = 500
LONG = {"max_model_len": 640}


@pytest.mark.engine
@pytest.mark.parametrize("name", full_but({"early"}, METHODS))
def test_acceptance_is_what_it_was(name: str) -> None:
    options = METHODS[name] | {"disable_by_batch_size": 1}
    llm = start_engine(
        DEMO,
        options,
        max_num_seqs=2,
        **LONG,
    )
    engine = llm.llm_engine
    drafts_by_size = engine.engine_core.engine_core.scheduler.dynamic_sd_lookup
    drafts = drafts_by_size[1]
    # Greedy text ends in a loop, which the heads do not know and lookups do.
    params = greedy(TOKENS, temperature=0.0 if "lookup" in name else 0.8, seed=1)

    def accepted_late(drafting_early: bool) -> int:
        """Accepted drafts of a request's last tokens, those behind the first STEPS."""
        emitted = 0
        drafts_by_size[1] = drafts if drafting_early else 0
        engine.add_request("request", prompts(1)[0], params)
        while emitted < STEPS:
            with counting(llm) as seen:
                for output in engine.step():
                    emitted = len(output.outputs[0].token_ids)
            assert drafting_early or not seen["accepted"]
        drafts_by_size[1] = drafts
        with counting(llm) as seen:
            while engine.has_unfinished_requests():
                engine.step()
        return int(seen["accepted"])

    always, late = accepted_late(True), accepted_late(False)
    # A step may cross the border
    assert always > 10 and abs(always - late) <= 4
