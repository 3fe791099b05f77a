# SPDX-License-Identifier: Apache-2.0
"""Published speculators in engines: what they draft is the formulas'."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import generate, greedy, prompts
from conftest import Factory, drafter_of, full_but
from published import LAYOUTS, drafts, publish, weights_of
from refusals import edited
from safetensors.torch import save_file

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("layout", "size"),
    full_but(
        {*product(LAYOUTS, [None]), ("ibm", 40), ("arctic-lstm", 40)},
        product(LAYOUTS, [None, 40]),
    ),
)
def test_drafts_are_the_formula(
    engine: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    size: int | None,
) -> None:
    """Of the whole vocabulary, and of the tokens that a text has most often; the output
    is vLLM's.
    """
    folder = publish(
        tmp_path / "heads",
        layout,
        "speculator.",
        2,
    )
    config = LAYOUTS[layout]
    tensors = weights_of(config)
    options: dict[str, Any] = {"model": str(folder), "draft_vocab_size": size}
    if size is not None:
        counts = torch.zeros(320, dtype=torch.int64)
        counts[7 : 7 + 2 * size : 2] = 5
        save_file({"token_counts": counts}, folder / "token_counts.safetensors")
        edited("token_counts", value=True)(folder)
        for name in tensors:
            if name.startswith("head"):
                tensors[name][counts == 0] = -1e3
    llm = engine(options)
    drafter = drafter_of(llm).drafter
    seen = []
    propose = drafter.propose

    def spied(step: Any) -> Any:
        made = propose(step)
        drafted = made.token_ids.tolist()
        seen.extend(zip(step.hidden.clone(), step.newest_ids.tolist(), drafted))  # noqa: B905
        return made

    monkeypatch.setattr(drafter, "propose", spied)
    expected = generate(engine(), prompts(3), greedy(12))
    assert generate(llm, prompts(3), greedy(12)) == expected
    assert len(seen) >= 30
    for hidden, newest, drafted in seen:
        assert drafted == drafts(
            config, tensors, hidden, newest, config["n_predict"]
        )
