# SPDX-License-Identifier: Apache-2.0
"""After a thousand steps without drafts their acceptance is what it was, on runner V2 as on V1."""

import pytest
from conftest import Factory
from small import METHODS
from test_steps_without_drafts import LONG, check_acceptance
from test_steps_without_drafts import METHODS as V1_METHODS

ALL = {**V1_METHODS, "dynamo": METHODS["dynamo"]}


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.engine
@pytest.mark.parametrize("name", ALL)
def test_acceptance_is_what_it_was(v2_engine: Factory, name: str) -> None:
    llm = v2_engine({**ALL[name], "disable_by_batch_size": 1}, max_num_seqs=2, **LONG)
    lookup = llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup
    drafts = lookup[1]
    check_acceptance(llm, "lookup" in name, lambda on: lookup.__setitem__(1, drafts if on else 0))
