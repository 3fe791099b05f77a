# SPDX-License-Identifier: Apache-2.0
"""The CP head and its mixture against the paper's formulas, written out in probability space."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from heads_folders import log_likelihood
from scipy.stats import chisquare

from vllm_ppd.heads.cp.module import CPHead
from vllm_ppd.kernels.cp_mixture import (
    balance_loss,
    chain_log_likelihood,
    draft_chain,
    joint_log_likelihood,
    mixture,
    posterior,
)
from vllm_ppd.kernels.sampling import Sampling

ROWS, POSITIONS, RANK, VOCAB, SIZE = 3, 3, 4, 5, 6
F64 = torch.float64


def seeded(*shape: int, seed: int = 0, scale: float = 1.5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64) * scale


def random_mixture(rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    """(log weights [rows, r], log factors [rows, n, r, V])."""
    factors = seeded(ROWS, POSITIONS, rank, VOCAB, seed=1).log_softmax(-1)
    return seeded(ROWS, rank).log_softmax(-1), factors


def head_of(factorised: bool, rank: int = RANK) -> tuple[CPHead, torch.Tensor | None, torch.Tensor]:
    """A head far from its start, its unembedding (none of the full form) and a bias."""
    head = CPHead(SIZE, POSITIONS, rank, VOCAB, factorised, F64)
    for seed, parameter in enumerate(head.parameters()):
        parameter.data.copy_(seeded(*parameter.shape, seed=seed, scale=0.7))
    return head, seeded(VOCAB, SIZE, seed=7) if factorised else None, seeded(VOCAB, seed=8)


def gathered(factors: torch.Tensor, tokens: tuple[int, ...]) -> torch.Tensor:
    """The factors of one tuple of tokens, the same for all rows: [rows, positions, r]."""
    return torch.stack([factors[:, s, :, token] for s, token in enumerate(tokens)], dim=1)


def slow_joint(weights: torch.Tensor, factors: torch.Tensor, tokens: tuple[int, ...]) -> float:
    """Eq. 2 of one row: weights [r] and factors [n, r, V] are probabilities; fewer tokens than n are a marginal."""
    total = 0.0
    for a in range(len(weights)):
        term = weights[a].item()
        for s, token in enumerate(tokens):
            term *= factors[s, a, token].item()
        total += term
    return total


def slow_softmax(logits: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def slow_conditional(weights: torch.Tensor, factors: torch.Tensor, before: tuple[int, ...]) -> list[float]:
    """P(x_s | tokens before), as a ratio of two joints."""
    below = slow_joint(weights, factors, before)
    return [slow_joint(weights, factors, (*before, token)) / below for token in range(VOCAB)]


def test_joint_is_the_sum_over_experts() -> None:
    weights, factors = random_mixture()
    for tokens in itertools.product(range(VOCAB), repeat=POSITIONS):
        found = joint_log_likelihood(weights, gathered(factors, tokens)).exp()
        for row in range(ROWS):
            expected = slow_joint(weights[row].exp(), factors[row].exp(), tokens)
            assert found[row].item() == pytest.approx(expected, rel=1e-12)


def test_joint_sums_to_one_over_all_tuples() -> None:
    weights, factors = random_mixture()
    tuples = itertools.product(range(VOCAB), repeat=POSITIONS)
    total = torch.stack([joint_log_likelihood(weights, gathered(factors, tokens)).exp() for tokens in tuples]).sum(0)
    torch.testing.assert_close(total, torch.ones(ROWS, dtype=F64))


def test_rank_1_is_independent_heads() -> None:
    weights, factors = random_mixture(rank=1)
    tokens = (4, 0, 2)
    seen = gathered(factors, tokens)
    torch.testing.assert_close(weights, torch.zeros(ROWS, 1, dtype=F64))
    torch.testing.assert_close(joint_log_likelihood(weights, seen), seen.sum(dim=(1, 2)))
    torch.testing.assert_close(mixture(posterior(weights, seen[:, 0]), factors[:, 1]), factors[:, 1, 0])


def test_posterior_is_bayes_rule() -> None:
    weights, factors = random_mixture()
    found = posterior(weights, factors[:, 0, :, 2]).exp()
    for row in range(ROWS):
        products = [weights[row, a].exp().item() * factors[row, 0, a, 2].exp().item() for a in range(RANK)]
        assert found[row].tolist() == pytest.approx([p / sum(products) for p in products], rel=1e-12)


def test_mixtures_are_the_conditionals_and_chain_to_the_joint() -> None:
    """Eq. 11 to 13, mended: each conditional is a ratio of joints, and their product is the joint."""
    weights, factors = random_mixture()
    for tokens in itertools.product(range(0, VOCAB, 2), repeat=POSITIONS):
        now, chain = weights, torch.zeros(ROWS, dtype=F64)
        for s, token in enumerate(tokens):
            log_probs = mixture(now, factors[:, s])
            for row in range(ROWS):
                expected = slow_conditional(weights[row].exp(), factors[row].exp(), tokens[:s])
                assert log_probs[row].exp().tolist() == pytest.approx(expected, rel=1e-10)
            chain = chain + log_probs[:, token]
            now = posterior(now, factors[:, s, :, token])
        seen = gathered(factors, tokens)
        torch.testing.assert_close(chain, joint_log_likelihood(weights, seen))
        torch.testing.assert_close(chain, chain_log_likelihood(weights, seen).sum(dim=1))


def test_mixture_normalises_the_weights() -> None:
    weights, factors = random_mixture()
    torch.testing.assert_close(mixture(weights - 3.0, factors[:, 0]), mixture(weights, factors[:, 0]))


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0, 1.0], [-3e4, 3e4, 2.0, 0.0]]).expand(2, 3, 2, 4)
    factors = logits.log_softmax(-1)
    weights = torch.tensor([[0.0, -1e4], [-1e4, 0.0]], requires_grad=True)
    seen = factors[..., 1]
    joint = joint_log_likelihood(weights, seen)
    found = [joint, posterior(weights, seen[:, 0]), mixture(weights, factors[:, 0])]
    found += [chain_log_likelihood(weights, seen), balance_loss(weights)]
    joint.sum().backward()
    assert weights.grad is not None
    assert all(tensor.isfinite().all() for tensor in [*found, weights.grad])
    tokens, probs = draft_chain(weights, logits, torch.tensor([1, 1]), Sampling(torch.tensor([0.0, 1.0])))
    torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[..., 0]))
    assert tokens.tolist() == [[1, 1], [1, 1]]  # expert 1 alone explains token 1


def test_tokens_that_all_experts_rule_out() -> None:
    """A vocabulary's masked entries are never drafted, and one that the target samples anyway costs no NaN."""
    weights = torch.tensor([[-0.5, -0.9327521]])
    torch.testing.assert_close(posterior(weights, torch.full((1, 2), -math.inf)), weights)
    logits = torch.zeros(1, 3, 2, 4)
    logits[..., 3] = -math.inf
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        tokens, probs = draft_chain(weights, logits, torch.tensor([3]), Sampling(torch.ones(1)), generator)
        log_probs = probs.log()
        assert tokens.max() < 3
        torch.testing.assert_close(log_probs.exp(), torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]).expand(1, 2, 4))


def test_half_precision_is_computed_in_float32() -> None:
    weights, factors = random_mixture()
    weights, factors = weights.bfloat16(), factors.bfloat16()
    found = mixture(weights, factors[:, 0])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, mixture(weights.float(), factors[:, 0].float()))


def test_balance_loss_is_that_of_the_hard_counts() -> None:
    log_weights = seeded(20, RANK, seed=3).log_softmax(-1)
    for valid in (None, torch.arange(20) % 3 > 0):
        kept = [row for row in range(20) if valid is None or valid[row]]
        counts = [0] * RANK
        for row in kept:
            counts[max(range(RANK), key=lambda a: log_weights[row, a].item())] += 1
        expected = sum((count / len(kept) - 1 / RANK) ** 2 for count in counts)
        assert balance_loss(log_weights, valid).item() == pytest.approx(expected, rel=1e-12)


def test_balance_loss_lowers_the_dominant_expert() -> None:
    logits = seeded(12, 3, seed=4, scale=0.1)
    logits[:, 1] += 2.0
    logits.requires_grad_()
    before = logits.log_softmax(-1)
    balance_loss(before).backward()
    assert logits.grad is not None
    after = (logits - 0.1 * logits.grad).log_softmax(-1)
    assert (after[:, 1] < before[:, 1]).all()


def test_balance_loss_vanishes() -> None:
    balanced = (torch.eye(3, dtype=F64).repeat(4, 1) * 2).log_softmax(-1).requires_grad_()
    assert balance_loss(balanced).item() == pytest.approx(0.0, abs=1e-24)
    alone = torch.zeros(5, 1, requires_grad=True)
    assert balance_loss(alone).item() == 0.0
    nobody = balance_loss(balanced, torch.zeros(12, dtype=torch.bool))
    nobody.backward()
    assert nobody.item() == 0.0


@pytest.mark.parametrize("factorised", [True, False])
def test_log_factors_and_weights_are_the_paper_s(factorised: bool) -> None:
    """Eq. 6 and 7, one number at a time."""
    head, unembedding, bias = head_of(factorised)
    hidden = seeded(ROWS, SIZE, seed=5)
    found, weights = head.log_factors(hidden, unembedding, bias).exp(), head.log_weights(hidden).exp()
    assert found.shape == (ROWS, POSITIONS, RANK, VOCAB)
    for row, s, a in itertools.product(range(ROWS), range(POSITIONS), range(RANK)):
        if head.transforms is not None and unembedding is not None:
            matrix = unembedding @ head.transforms[s, a]
        else:
            assert head.classifiers is not None
            matrix = head.classifiers[s, a]
        logits = [sum((matrix[v] * hidden[row]).tolist()) + bias[v].item() for v in range(VOCAB)]
        assert found[row, s, a].tolist() == pytest.approx(slow_softmax(logits), rel=1e-10)
    for row in range(ROWS):
        expected = slow_softmax([sum((head.gate[a] * hidden[row]).tolist()) for a in range(RANK)])
        assert weights[row].tolist() == pytest.approx(expected, rel=1e-10)


def test_factorised_is_full_with_classifiers_e_t() -> None:
    head, unembedding, bias = head_of(True)
    assert head.transforms is not None and unembedding is not None
    tensors = {"cp.gate": head.gate.detach(), "cp.classifiers": (unembedding @ head.transforms).detach()}
    full = CPHead.from_tensors(tensors)
    hidden = seeded(ROWS, SIZE, seed=5)
    torch.testing.assert_close(full.log_factors(hidden, None, bias), head.log_factors(hidden, unembedding, bias))
    torch.testing.assert_close(full.log_weights(hidden), head.log_weights(hidden))


@pytest.mark.parametrize("factorised", [True, False])
def test_log_likelihood_whatever_the_chunk(factorised: bool) -> None:
    head, unembedding, bias = head_of(factorised)
    hidden = seeded(7, SIZE, seed=5).requires_grad_()
    tokens = torch.randint(VOCAB, (7, POSITIONS), generator=torch.Generator().manual_seed(6))
    weights, factors = head.log_weights(hidden).exp(), head.log_factors(hidden, unembedding, bias).exp()
    slow = [[slow_joint(weights[i], factors[i], tuple(tokens[i, :s].tolist())) for s in range(4)] for i in range(7)]
    gradients = []
    for chunk in (1, 3, 7, 100):
        joint, chain = log_likelihood(head, hidden, tokens, unembedding, bias, chunk=chunk)
        assert joint.tolist() == pytest.approx([math.log(row[-1]) for row in slow], rel=1e-10)
        for row in range(7):
            expected = [math.log(slow[row][s + 1] / slow[row][s]) for s in range(POSITIONS)]
            assert chain[row].tolist() == pytest.approx(expected, rel=1e-9)
        gradients.append(torch.autograd.grad(joint.sum() + chain[:, 1].sum(), [hidden, *head.parameters()]))
        with torch.no_grad():
            torch.testing.assert_close(log_likelihood(head, hidden, tokens, unembedding, bias, chunk)[0], joint)
    # The first gradient's own check: the joint without chunks, checkpoints or the gather.
    picked = head.log_factors(hidden, unembedding, bias)
    seen = torch.stack([gathered(picked[i : i + 1], tuple(tokens[i].tolist()))[0] for i in range(7)])
    direct = joint_log_likelihood(head.log_weights(hidden), seen)
    chain = chain_log_likelihood(head.log_weights(hidden), seen)
    gradients.append(torch.autograd.grad(direct.sum() + chain[:, 1].sum(), [hidden, *head.parameters()]))
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


def test_gradients_are_those_of_finite_differences() -> None:
    head, unembedding, bias = head_of(True, rank=2)
    tokens = torch.tensor([[1, 4, 0], [2, 2, 3]])

    def likelihoods(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return log_likelihood(head, hidden, tokens, unembedding, bias, chunk=1)

    assert torch.autograd.gradcheck(likelihoods, (seeded(2, SIZE, seed=5).requires_grad_(),))


def test_log_likelihood_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    head, unembedding, bias = head_of(False)
    seen = []
    whole = head.logits

    def watched(hidden: torch.Tensor, unembedding: None, bias: torch.Tensor, context: None) -> torch.Tensor:
        seen.append(hidden.shape[0])
        return whole(hidden, unembedding, bias)

    monkeypatch.setattr(head, "logits", watched)
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept = max(kept, tensor.numel() if tensor.shape[-1] == VOCAB else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        joint, _ = log_likelihood(
            head, seeded(7, SIZE, seed=5), torch.zeros(7, POSITIONS, dtype=torch.int64), unembedding, bias, chunk=3
        )
    assert (seen, kept) == ([3, 3, 1], 0)
    joint.sum().backward()
    assert sorted(seen) == [1, 1, 3, 3, 3, 3]


def test_no_rows() -> None:
    head, unembedding, bias = head_of(True)
    hidden, none = torch.zeros(0, SIZE, dtype=F64), torch.zeros(0, POSITIONS, dtype=torch.int64)
    joint, chain = log_likelihood(head, hidden, none, unembedding, bias)
    tokens, probs = head.draft(hidden, none[:, 0], unembedding, bias, Sampling(torch.zeros(0)))
    log_probs = probs.log()
    assert (joint.shape, chain.shape, tokens.shape) == ((0,), (0, 3), (0, 2))
    assert log_probs.shape == (0, 2, VOCAB)


@pytest.mark.parametrize("factorised", [True, False])
def test_greedy_draft_is_the_arg_max_of_the_conditionals(factorised: bool) -> None:
    head, unembedding, bias = head_of(factorised)
    hidden, first = seeded(8, SIZE, seed=5), torch.arange(8) % VOCAB
    weights, factors = head.log_weights(hidden).exp(), head.log_factors(hidden, unembedding, bias).exp()
    for sampling in (None, Sampling(torch.full((8,), 1e-6))):
        tokens, probs = head.draft(hidden, first, unembedding, bias, sampling)
        log_probs = probs.log()
        assert not log_probs.requires_grad
        for row in range(8):
            before: tuple[int, ...] = (int(first[row]),)
            for s in range(POSITIONS - 1):
                expected = slow_conditional(weights[row], factors[row], before)
                assert log_probs[row, s].exp().tolist() == pytest.approx(expected, rel=1e-9)
                before = (*before, max(range(VOCAB), key=expected.__getitem__))
            assert tuple(tokens[row].tolist()) == before[1:]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_drafts_follow_the_mixture(temperature: float) -> None:
    """Chi-square of all (x_2, x_3) given x_1; at temperature 1 they follow the joint itself."""
    head, unembedding, bias = head_of(True)
    draws, first = 20_000, 3
    hidden = seeded(1, SIZE, seed=5, scale=0.3)
    weights, factors = head.log_weights(hidden).exp()[0], head.log_factors(hidden, unembedding, bias).exp()[0]

    def sharpened(before: tuple[int, ...]) -> list[float]:
        powers = [p ** (1 / temperature) for p in slow_conditional(weights, factors, before)]
        return [p / sum(powers) for p in powers]

    tokens, probs = head.draft(
        hidden.expand(draws, -1),
        torch.full((draws,), first),
        unembedding,
        bias,
        Sampling(torch.full((draws,), temperature)),
        torch.Generator().manual_seed(11),
    )
    log_probs = probs.log()
    counts = torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2)
    second = sharpened((first,))
    expected = [second[x] * p * draws for x in range(VOCAB) for p in sharpened((first, x))]
    # Pairs too rare for the statistic are one class.
    classes = [pair if expected[pair] >= 5 else -1 for pair in range(VOCAB**2)]
    observed, wanted = dict.fromkeys(classes, 0.0), dict.fromkeys(classes, 0.0)
    for pair, c in enumerate(classes):
        observed[c] += counts[pair].item()
        wanted[c] += expected[pair]
    assert len(wanted) > 15
    assert chisquare(list(observed.values()), list(wanted.values())).pvalue > 1e-3
    assert log_probs[0, 0].exp().tolist() == pytest.approx(second, rel=1e-9)
    for row in range(20):
        expected_third = sharpened((first, int(tokens[row, 0])))
        assert log_probs[row, 1].exp().tolist() == pytest.approx(expected_third, rel=1e-9)


def test_rows_have_a_temperature_each() -> None:
    head, unembedding, bias = head_of(True)
    hidden, first = seeded(1, SIZE, seed=5).expand(400, -1), torch.zeros(400, dtype=torch.int64)
    temperature = torch.where(torch.arange(400) % 2 == 0, 0.0, 2.0)
    greedy, mixtures = head.draft(hidden[:1], first[:1], unembedding, bias)
    mixtures = mixtures.log()
    tokens, probs = head.draft(
        hidden, first, unembedding, bias, Sampling(temperature), torch.Generator().manual_seed(0)
    )
    log_probs = probs.log()
    assert (tokens[::2] == greedy).all()
    torch.testing.assert_close(log_probs[::2], mixtures.expand(200, -1, -1))
    assert len(tokens[1::2].unique(dim=0)) > 5
    flat = (mixtures[0, 0] / 2).log_softmax(-1)
    torch.testing.assert_close(log_probs[1::2, 0], flat.expand(200, -1))


def test_the_same_generator_drafts_the_same() -> None:
    head, unembedding, bias = head_of(True)
    hidden, first = seeded(50, SIZE, seed=5), torch.zeros(50, dtype=torch.int64)
    drafts = [
        head.draft(hidden, first, unembedding, bias, Sampling(torch.ones(50)), torch.Generator().manual_seed(seed))[0]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(drafts[0], drafts[1])
    assert not torch.equal(drafts[0], drafts[2])


def test_fresh_experts_stand_near_the_target_s_head_but_apart() -> None:
    hidden, unembedding = torch.randn(4, 64), torch.randn(30, 64)
    factorised, full = CPHead(64, 2, 3), CPHead(64, 2, 3, 30, factorised=False)
    assert full.classifiers is not None and not full.classifiers.any()
    full.init_classifiers(unembedding)
    for head in (factorised, full):
        logits = head.logits(hidden, unembedding)
        assert (logits - hidden.matmul(unembedding.T)[:, None, None]).norm() < 0.02 * logits.norm()
        assert not torch.equal(logits[:, 0, 0], logits[:, 0, 1])
        # The balance loss starts from experts that share the tokens, not from a tie.
        assert len(head.log_weights(torch.randn(50, 64)).argmax(-1).unique()) == 3
    assert torch.equal(factorised.tensors()["cp.transforms"], CPHead(64, 2, 3).tensors()["cp.transforms"])
    assert not torch.equal(factorised.gate, CPHead(64, 2, 3, seed=1).gate)
    torch.testing.assert_close(CPHead(64, 2, 1).states(hidden), hidden[:, None, None].expand(-1, 2, 1, -1))


def test_gradient_separates_the_experts() -> None:
    """Tokens that come in pairs: rank 1 cannot fall under 2 log 2, rank 2 learns the pairs from its fresh start."""
    torch.manual_seed(0)
    hidden, unembedding = torch.ones(64, 8), torch.randn(4, 8)
    tokens = torch.tensor([[0, 1], [2, 3]]).repeat(32, 1)
    losses = {}
    for rank in (1, 2):
        head = CPHead(8, 2, rank)
        optimiser = torch.optim.Adam(head.parameters(), lr=0.03)
        for _ in range(150):
            optimiser.zero_grad()
            loss = -log_likelihood(head, hidden, tokens, unembedding)[0].mean()
            loss.backward()
            optimiser.step()
        losses[rank] = loss.item()
    assert losses[1] > 2 * math.log(2) - 1e-4
    assert losses[2] < math.log(2) + 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factorised", [True, False])
def test_tensors_round_trip(factorised: bool, dtype: torch.dtype) -> None:
    head = CPHead(SIZE, POSITIONS, RANK, VOCAB, factorised, dtype)
    if not factorised:
        head.init_classifiers(torch.randn(VOCAB, SIZE))
    tensors = head.tensors()
    name, rows = ("cp.transforms", SIZE) if factorised else ("cp.classifiers", VOCAB)
    assert {key: [*value.shape] for key, value in tensors.items()} == {
        "cp.gate": [RANK, SIZE],
        name: [POSITIONS, RANK, rows, SIZE],
    }
    again = CPHead.from_tensors(tensors)
    assert (again.positions, again.rank, again.factorised) == (POSITIONS, RANK, factorised)
    assert all(torch.equal(value, tensors[key]) for key, value in again.tensors().items())
    hidden, unembedding = torch.randn(2, SIZE, dtype=dtype), torch.randn(VOCAB, SIZE, dtype=dtype)
    assert again.logits(hidden, unembedding).dtype == dtype
    tokens, probs = again.draft(hidden, torch.tensor([0, 1]), unembedding)
    log_probs = probs.log()
    assert (tokens.shape, log_probs.dtype) == ((2, POSITIONS - 1), torch.float32)


def test_low_temperatures_draw_the_best() -> None:
    """At 0.01 a probability of 0.4 to the power of 100 is 0 in float32; the peak is drawn all the same."""
    torch.manual_seed(0)
    logits = torch.randn(5, 3, 2, 200)
    weights, first = torch.zeros(5, 2).log_softmax(-1), torch.tensor([3, 9, 0, 7, 1])
    best, _ = draft_chain(weights, logits, first)
    for temperature in (0.01, 0.001):
        tokens, probs = draft_chain(weights, logits, first, Sampling(torch.full((5,), temperature)))
        torch.testing.assert_close(probs.sum(-1), torch.ones(5, 2))
        assert (tokens == best).float().mean() > 0.7
