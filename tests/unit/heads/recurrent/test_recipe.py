# SPDX-License-Identifier: Apache-2.0
"""Training of recurrent heads: where they start, and what is saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Factory
from overfitted import fit

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.io import load_tensors
from vllm_ppd.heads.recurrent.config import RecurrentConfig, RecurrentOptions
from vllm_ppd.heads.recurrent.recipe import RecurrentRecipe
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch


def recipe_of(model: Path, **options: Any) -> RecurrentRecipe:
    target = Target(str(model), torch.device("cpu"), torch.float32)
    return RecurrentRecipe(
        RecurrentOptions(model="-", data=("-",), out="-", **options), target
    )


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("tie_weights", [False, True])
def test_heads_start_as_a_linear_prediction_of_the_next_state(
    tiny_model: Factory, scale_input: bool, tie_weights: bool
) -> None:
    """The state's halves are GELU(u) and GELU(-u); their difference is nearest to the
    target's next state.
    """
    recipe = recipe_of(tiny_model(), scale_input=scale_input, tie_weights=tie_weights)
    torch.manual_seed(0)
    batches = [
        Batch(torch.randint(1, 300, (8, 64)), torch.arange(64).expand(8, -1))
        for _ in range(8)
    ]
    recipe.start_from(iter(batches))
    final = recipe.target.run(batches[0]).final
    tokens, valid = batches[0].ahead(4)
    rows = valid.nonzero().squeeze(1)
    first, *_ = recipe.head.states(final[rows], tokens[rows]).unbind(1)
    predicted = first[:, :64] - first[:, 64:]
    wanted = final[rows + 1]
    before = final[rows]
    assert (predicted - wanted).square().mean() < 0.9 * wanted.square().mean()
    assert (predicted - wanted).square().mean() < 0.9 * (
        before - wanted
    ).square().mean()
    logits = recipe.head.logits(final[rows], None, None, tokens[rows])[:, 0, 0]
    torch.testing.assert_close(
        logits, predicted @ recipe.target.unembedding.T, rtol=1e-4, atol=1e-4
    )


def test_what_is_saved_has_the_keys_and_tensors_of_ibm(
    tiny_model: Factory, tmp_path: Path
) -> None:
    folder = fit(
        tiny_model(),
        "recurrent",
        [[5, 6, 7, 8, 9, 10, 11, 12]] * 4,
        tmp_path,
        2,
        tie_weights=False,
    )
    written = json.loads((folder / "config.json").read_text())
    assert (
        written["architectures"] == ["MLPSpeculatorPreTrainedModel"]
        and written["model_type"] == "mlp_speculator"
    )
    assert (
        written["emb_dim"],
        written["inner_dim"],
        written["vocab_size"],
        written["n_predict"],
    ) == (64, 128, 320, 3)
    assert (
        len(written["top_k_tokens_per_head"]) == 3
        and written["scale_input"] is written["tie_weights"] is False
    )
    config, tensors = load_tensors(folder, RecurrentConfig)
    names = (
        "emb.{}.weight",
        "proj.{}.weight",
        "ln.{}.weight",
        "ln.{}.bias",
        "head.{}.weight",
    )
    assert tensors.keys() == {name.format(i) for name in names for i in range(3)} | {
        "token_counts"
    }
    assert config.verifier == str(tiny_model()) and config.target.num_hidden_layers == 6


def test_a_ridge_start_needs_a_state_of_twice_the_width(tiny_model: Factory) -> None:
    with pytest.raises(
        TrainingError,
        match=r"--inner-size 100: a ridge regression needs a state of twice .*, 128;",
    ):
        recipe_of(tiny_model(), inner_size=100)
