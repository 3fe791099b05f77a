# SPDX-License-Identifier: Apache-2.0
"""Training of recurrent heads: where they start, and what is saved."""

import json
from pathlib import Path

import pytest
import torch
from conftest import Factory
from overfitted import fit, untrained

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.folder import load_tensors
from vllm_ppd.heads.recurrent.config import RecurrentConfig
from vllm_ppd.heads.training.tokens import Batch


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("tie_weights", [False, True])
def test_heads_start_as_a_linear_prediction_of_the_next_state(
    tiny_model: Factory, scale_input: bool, tie_weights: bool
) -> None:
    """The state's halves are GELU(u) and GELU(-u); their difference is nearest to the
    target's next state.
    """
    recipe = untrained(
        tiny_model(),
        "recurrent",
        scale_input=scale_input,
        tie_weights=tie_weights,
    )
    torch.manual_seed(0)
    places = torch.arange(64).expand(8, -1)
    batches = [Batch(torch.randint(1, 300, (8, 64)), places) for _ in range(8)]
    recipe.start_from(iter(batches))
    final = recipe.target.run(batches[0]).final
    tokens, valid = batches[0].ahead(4)
    rows = valid.all(dim=1).nonzero().squeeze(1)
    before = final[rows]
    wanted = final[rows + 1]
    first = recipe.head.states(before, tokens[rows])[:, 0]
    predicted = first[:, :64] - first[:, 64:]
    error = (predicted - wanted).square().mean()
    assert error < 0.9 * wanted.square().mean()
    assert error < 0.9 * (before - wanted).square().mean()
    logits = recipe.head.logits(
        before,
        None,
        None,
        tokens[rows],
    )[:, 0, 0]
    expected = predicted @ recipe.target.unembedding.T
    torch.testing.assert_close(
        logits,
        expected,
        rtol=1e-4,
        atol=1e-4,
    )


def test_what_is_saved_has_the_keys_and_tensors_of_ibm(
    tiny_model: Factory, tmp_path: Path
) -> None:
    sequences = [[5, 6, 7, 8, 9, 10, 11, 12]] * 4
    fit(
        tiny_model(),
        "recurrent",
        sequences,
        tmp_path,
        2,
        tie_weights=False,
    )
    expected = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": 64,
        "inner_dim": 128,
        "vocab_size": 320,
        "n_predict": 3,
        "top_k_tokens_per_head": [1, 1, 1],
        "scale_input": False,
        "tie_weights": False,
    }
    written = json.loads((tmp_path / "config.json").read_text())
    assert expected.items() <= written.items()
    config, tensors = load_tensors(tmp_path, RecurrentConfig)
    assert tensors["token_counts"].sum() == 32
    assert (
        config.verifier == str(tiny_model())
        and config.target.num_hidden_layers == 6
    )


def test_a_ridge_start_needs_a_state_of_twice_the_width(
    tiny_model: Factory,
) -> None:
    with pytest.raises(
        TrainingError,
        match=r"--inner-size 100: a ridge regression needs a state of twice .*, 128;",
    ):
        untrained(tiny_model(), "recurrent", inner_size=100)
