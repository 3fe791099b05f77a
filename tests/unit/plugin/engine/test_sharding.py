# SPDX-License-Identifier: Apache-2.0
"""Which matrices ranks divide, by the sizes of Llama 3 8B and 70B in bfloat16."""

import pytest

from vllm_ppd.vllm_plugins.engine.target import pays

# [out, in] by the width d of the states. A recurrence is V, W_g, W_i and W_o, of 2 d
# inner numbers; a quarter of the vocabulary is drafted.
PARTS = {
    "recurrence": lambda d: 12 * d * d,
    "draft vocabulary": lambda d: 32_064 * d,
    "short draft vocabulary": lambda d: 4096 * d,
    "low-rank experts": lambda d: 96 * d,
}
MODELS = {"8B": 4096, "70B": 8192}


@pytest.mark.parametrize(
    ("model", "ranks", "divided"),
    [
        ("8B", 1, []),
        ("8B", 2, ["recurrence", "draft vocabulary"]),
        ("8B", 4, ["recurrence", "draft vocabulary"]),
        ("70B", 4, ["recurrence", "draft vocabulary", "short draft vocabulary"]),
        ("70B", 8, ["recurrence", "draft vocabulary", "short draft vocabulary"]),
    ],
)
def test_what_is_divided(model: str, ranks: int, divided: list[str]) -> None:
    found = [
        part
        for part, numbers in PARTS.items()
        if pays(2 * numbers(MODELS[model]), ranks)
    ]
    assert found == divided
