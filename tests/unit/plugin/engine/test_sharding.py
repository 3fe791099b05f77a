# SPDX-License-Identifier: Apache-2.0
"""The target's LM head, and which matrices ranks divide, by the sizes of Llama 3 8B and
70B in bfloat16.
"""

from types import SimpleNamespace

import pytest
import torch

from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.engine.target import TargetLMHead, pays

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


def test_an_lm_head_of_another_name_is_one_line() -> None:
    config = SimpleNamespace(model_config=None)
    with pytest.raises(OptionError, match="Module has no lm_head"):
        TargetLMHead(torch.nn.Module(), config, torch.device("cpu"))
