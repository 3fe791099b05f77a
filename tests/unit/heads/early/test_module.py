# SPDX-License-Identifier: Apache-2.0
"""Early heads: where they start, what they learn and compute, and their folder."""

import torch
from conftest import Factory
from overfitted import untrained
from safetensors.torch import load_file
from torch.nn import functional

from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.folder import kind_of, load_tensors
from vllm_ppd.heads.training.tokens import Batch


def test_fresh_heads_are_the_untrained_exit(tiny_model: Factory) -> None:
    heads = untrained(tiny_model(), "early", exit_layers=(5, 2)).heads
    hidden = torch.randn(4, 64)
    assert heads.exit_layers == (2, 5) and torch.equal(heads(hidden, 5), hidden)


def test_default_exits_are_shallow(tiny_model: Factory) -> None:
    assert untrained(tiny_model(), "early").heads.exit_layers == (1, 2)


def window() -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        2,
        250,
        (12, 80),
        generator=generator,
    )
    return Batch(ids, torch.arange(80).expand(12, -1))


def test_ridge_starts_nearer_to_the_target(tiny_model: Factory) -> None:
    recipe = untrained(tiny_model(), "early")
    identity = float(recipe.loss(window())[0].detach())
    recipe.start_from(iter([window()]))
    assert float(recipe.loss(window())[0].detach()) < 0.7 * identity


def test_loss_over_a_draft_vocabulary(tiny_model: Factory) -> None:
    """The target's distribution over these tokens; a draft is right if it is the
    target's choice of all tokens.
    """
    recipe = untrained(
        tiny_model(), "early", exit_layers=(4,), train_vocab_size=150
    )
    ids = torch.arange(9, 159)
    recipe.use_vocabulary(ids)
    recipe.eval()
    batch = window()
    loss, counts = recipe.loss(batch)
    states = recipe.target.run(batch, (4,))
    rows = batch.ahead(1)[1][:, 0]
    unembedding = recipe.target.unembedding
    of_exit = (states.exits[4][rows] @ unembedding[ids].T).log_softmax(-1)
    whole = states.final[rows] @ unembedding.T
    of_target = whole[:, ids].log_softmax(-1)
    divergence = functional.kl_div(
        of_exit, of_target, reduction="batchmean", log_target=True
    )
    torch.testing.assert_close(loss, divergence)
    right = ids[of_exit.argmax(-1)] == whole.argmax(-1)
    assert int(counts["match.4"]) == int(right.sum()) > 0


def test_head_is_lm_head_times_transform(heads_folder: Factory) -> None:
    """softmax(E* T h) is what a full head E^(i) = E* T^(i) computes (ParaDecode, section 2.1)."""
    folder = heads_folder(exit_layers=(2, 4), noise=0.1)
    assert kind_of(folder) == "early"
    heads = EarlyHeads(*load_tensors(folder, EarlyConfig))
    transform = load_file(folder / "model.safetensors")["exit.4.transform"]
    torch.manual_seed(0)
    lm_head = torch.randn(50, 64)
    hidden = torch.randn(4, 64)
    expected = hidden @ (lm_head @ transform).T
    torch.testing.assert_close(heads(hidden, 4) @ lm_head.T, expected)
