# SPDX-License-Identifier: Apache-2.0
"""Recurrent heads in every published layout against the formulas, and against what vLLM
has of them.
"""

from pathlib import Path

import pytest
import torch
from published import LAYOUTS, VOCAB, publish, states, weights_of

from vllm_ppd.heads.folder import load_tensors
from vllm_ppd.heads.recurrent.config import RecurrentConfig
from vllm_ppd.heads.recurrent.module import RecurrentHead


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_the_formula(tmp_path: Path, layout: str) -> None:
    folder = publish(tmp_path, layout, "speculator.", 3)
    head = RecurrentHead(*load_tensors(folder, RecurrentConfig))
    torch.manual_seed(0)
    hidden = 2 * torch.randn(4, 64)
    tokens = torch.randint(VOCAB, (4, head.factors))
    ours = head.logits(
        hidden,
        None,
        None,
        tokens,
    ).squeeze(2)
    config = LAYOUTS[layout]
    weights = weights_of(config)
    for row in range(4):
        plain = states(
            config,
            weights,
            hidden[row],
            tokens[row].tolist(),
        )
        expected = torch.stack([logits for logits, _ in plain])
        torch.testing.assert_close(
            ours[row],
            expected,
            rtol=1e-4,
            atol=1e-4,
        )
    asked = torch.randint(VOCAB, (4, head.factors, 3))
    log_probs = head.log_probs(
        hidden, asked, None, None, tokens, chunk=3
    ).squeeze(2)
    expected = ours.log_softmax(-1).gather(2, asked)
    torch.testing.assert_close(
        log_probs,
        expected,
        rtol=1e-4,
        atol=1e-4,
    )
