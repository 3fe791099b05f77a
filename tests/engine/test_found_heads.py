# SPDX-License-Identifier: Apache-2.0
"""`--speculative-model ppd` alone drafts with the heads in the demo model's folder."""

import pytest
from cases import greedy
from conftest import DEMO, drafter_of, start_engine


@pytest.mark.engine
def test_the_demo_model_has_early_heads() -> None:
    texts = []
    for options in (None, {"method": "ppd"}):
        llm = start_engine(DEMO, options)
        (output,) = llm.generate(
            ["def __init__(self, "], greedy(64), use_tqdm=False
        )
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]
    assert drafter_of(llm).config.model == str(DEMO / "ppd")
    assert llm.counts["accepted"] > 0
