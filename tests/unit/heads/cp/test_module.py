# SPDX-License-Identifier: Apache-2.0
"""CP heads of every form against the formulas, one factor at a time in probability space."""

from typing import Any

import pytest
import torch
from heads_folders import cp_head, draft, log_likelihood, sampling_at
from scipy.stats import chisquare

from vllm_ppd.kernels.sampling import UNLIMITED

ROWS = 7
POSITIONS = 4
RANK = 2
VOCAB = 5
SIZE = 6
F64 = torch.float64
FORM: dict[str, dict[str, Any]] = {
    "full": {"condition": "none", "factorized": False},
    "none": {"condition": "none"},
    "recurrent": {"condition": "recurrent"},
    "layers": {"condition": "recurrent", "layers": (1,)},
}
FORMS = pytest.mark.parametrize("form", FORM)


def seeded(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64) * scale


class Made:
    """A head of a form, far from its start, with an unembedding, a bias and the
    embeddings that it may read.
    """

    def __init__(
        self,
        form: str,
        positions: int = POSITIONS,
    ) -> None:
        shape = {"positions": positions, "rank": RANK, "inner_size": 5}
        self.head = cp_head(
            SIZE, VOCAB, expert_rank=2, **shape, **FORM[form]
        ).double()
        self.size = SIZE * (
            1 + len(self.head.layers)
        )  # of what is read of the target
        for seed, (_, weight) in enumerate(sorted(self.head.tensors().items())):
            weight.data.copy_(seeded(*weight.shape, seed=seed, scale=0.6))
        self.unembedding = (
            None if form == "full" else seeded(VOCAB, SIZE, seed=20)
        )
        self.bias = seeded(VOCAB, seed=8)
        self.embeddings = seeded(
            VOCAB,
            SIZE,
            seed=21,
            scale=0.3,
        )

    def likelihood(
        self, hidden: torch.Tensor, tokens: torch.Tensor, chunk: int = 64
    ) -> tuple[Any, Any]:
        """The joint [rows] of tokens [rows, positions], and its chain [rows, factors]."""
        context = self.embeddings[tokens[:, :-1]] if self.head.lead else None
        later = tokens[:, self.head.lead :]
        return log_likelihood(
            self.head, hidden, later, self.unembedding, self.bias, context, chunk
        )

    def draft(
        self, hidden: torch.Tensor, first: torch.Tensor, sampling: Any = None
    ) -> torch.Tensor:
        torch.manual_seed(11)
        read = (self.unembedding, self.bias, sampling, self.embeddings)
        return draft(
            self.head,
            hidden,
            first,
            *read,
        )

    @torch.no_grad()
    def conditional(
        self, hidden: torch.Tensor, before: tuple[int, ...]
    ) -> torch.Tensor:
        """P(x_s | e, x_1..x_{s-1}) of a row (eq. 2, 6 and 7) [vocabulary], from a state
        [d] and the tokens before.
        """
        head = self.head
        named = {n.removeprefix("cp."): t for n, t in head.tensors().items()}
        weights = named["gate"] @ hidden[:SIZE]
        recurrent = hidden[:SIZE]
        if head.lead:
            weights = weights + named["token_gate"] @ self.embeddings[before[0]]
            named = {n.removeprefix("recurrence."): t for n, t in named.items()}
        if head.layers:
            blocks = torch.cat([normed(state) for state in hidden.split(SIZE)])
            recurrent = recurrent + named["fuse"] @ blocks
        weights = weights.softmax(0)
        for s, token in enumerate((*before[head.lead :], None)):
            if head.lead:
                embedded = self.embeddings[before[s]]
                recurrent = recurrent_state(
                    named,
                    recurrent,
                    embedded,
                )
            if head.lead:
                states = recurrent + named["up"] @ named["down"] @ recurrent
            elif self.unembedding is not None:
                states = named["transforms"][s] @ hidden
            if self.unembedding is None:
                logits = named["classifiers"][s] @ hidden
            else:
                logits = states @ self.unembedding.T
            mixed = (logits + self.bias).softmax(-1)
            if token is None:
                return weights @ mixed
            weights = weights * mixed[:, token]
            weights = weights / weights.sum()
        raise AssertionError


def normed(vector: torch.Tensor) -> torch.Tensor:
    return vector / (vector.square().mean() + 1e-6).sqrt()


def recurrent_state(
    named: dict[str, torch.Tensor], state: torch.Tensor, embedded: torch.Tensor
) -> torch.Tensor:
    """s + V u + W_o (silu(W_g u) * W_i u), u = [RMSNorm(s); RMSNorm(embedded)]: [d]."""
    matrix = torch.cat([named["inner"], named["token"]], dim=1)
    read = matrix @ torch.cat([normed(state), normed(embedded)])
    linear, gate, value = read.split([SIZE, 5, 5])
    gated = gate * gate.sigmoid() * value
    return state + linear + named["outer"] @ gated


@FORMS
def test_likelihoods_and_greedy_drafts_are_the_formula(form: str) -> None:
    """Position by position, whatever the chunk; and the gradients are those without chunks."""
    made = Made(form)
    hidden = seeded(ROWS, made.size, seed=5).requires_grad_()
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(
        VOCAB,
        (ROWS, POSITIONS),
        generator=generator,
    )
    drafts = made.draft(hidden, tokens[:, 0])
    nearly_greedy = sampling_at(torch.full((ROWS,), 1e-6))
    assert torch.equal(drafts, made.draft(hidden, tokens[:, 0], nearly_greedy))
    gradients = []
    for chunk in (100, 1, 3):
        joint, chain = made.likelihood(hidden, tokens, chunk)
        torch.testing.assert_close(joint, chain.sum(1))
        total = joint.sum() + chain[:, 1].sum()
        read = [hidden, *made.head.parameters()]
        gradients.append(torch.autograd.grad(total, read))
        torch.testing.assert_close(gradients[-1], gradients[0])
    for row in range(ROWS):
        text = tuple(tokens[row].tolist())
        state = hidden[row].detach()
        for s in range(made.head.lead, POSITIONS):
            expected = made.conditional(state, text[:s])[text[s]]
            likelihood = chain[row, s - made.head.lead].detach().exp()
            torch.testing.assert_close(likelihood, expected)
        drafted = text[:1]
        for _ in range(POSITIONS - 1):
            drafted = (*drafted, int(made.conditional(state, drafted).argmax()))
        assert tuple(drafts[row].tolist()) == drafted[1:]


@pytest.mark.parametrize(
    ("form", "temperature", "top_k"),
    [
        ("full", 1.0, UNLIMITED),
        ("none", 0.7, 3),
        ("recurrent", 3.0, UNLIMITED),
    ],
)
def test_sampled_drafts_follow_the_formula(
    form: str, temperature: float, top_k: int
) -> None:
    """Chi-square of all (x_2, x_3), at a temperature, cut and not."""
    made = Made(form, 3)
    draws = 20_000
    first = 3
    hidden = seeded(
        1,
        SIZE,
        seed=5,
        scale=0.2,
    )
    sampling = sampling_at(
        torch.full((draws,), temperature), torch.full((draws,), float(top_k))
    )
    tokens = made.draft(
        hidden.expand(draws, -1),
        torch.full((draws,), first),
        sampling,
    )

    def cut(before: tuple[int, ...]) -> torch.Tensor:
        sharpened = made.conditional(hidden[0], before) ** (1 / temperature)
        # Drafts follow a bound on top-k
        sharpened[sharpened < sharpened.max() / top_k] = 0
        return sharpened / sharpened.sum()

    second = cut((first,))
    expected = (
        torch.cat([second[x] * cut((first, x)) for x in range(VOCAB)]) * draws
    )
    counts = torch.bincount(
        tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2
    )
    possible = expected > 0
    assert counts[~possible].sum() == 0 and expected[possible].min() >= 5
    assert chisquare(counts[possible], expected[possible]).pvalue > 1e-3


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("form", ["full", "none"])
def test_fresh_experts_stand_near_the_targets_head_but_apart(
    form: str, rank: int
) -> None:
    """A single expert is the target's head."""
    hidden = torch.randn(50, 64)
    unembedding = torch.randn(30, 64)
    head = cp_head(
        64,
        30,
        0,
        unembedding,
        positions=2,
        rank=rank,
        **FORM[form],
    )
    logits = head.logits(hidden, unembedding)
    noise = logits - (hidden @ unembedding.T)[:, None, None]
    assert noise.norm() < (0.02 if rank > 1 else 1e-5) * logits.norm()
    # The balance loss starts from experts that share the tokens, not from a tie.
    assert len(head.log_weights(hidden).argmax(-1).unique()) == rank
    if rank > 1:
        assert not torch.equal(logits[:, 0, 0], logits[:, 0, 1])
