# SPDX-License-Identifier: Apache-2.0
"""CP head: the next n tokens from one hidden state, as a rank-r canonical decomposition of
their joint probability, or by a recurrent state that reads each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vllm_ppd.heads.cp.config import Condition, CPConfig
from vllm_ppd.heads.training.target import Target, TargetStates
from vllm_ppd.kernels.cp_mixture import (
    at_least_float32,
    draft_chain,
    mixture,
    posterior,
)
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.kernels.unembedding_loss import token_log_probs

Linear = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] to [rows, out]


def fused(hidden: torch.Tensor, size: int, fuse: Linear) -> torch.Tensor:
    """The first state, s_0 = e + W [RMSNorm(e); RMSNorm(h_l) of each layer l]: [rows,
    d].

    Args:
        hidden: e and the states after some layers, [rows, (1 + layers) d].
        size: d.
        fuse: W [d, (1 + layers) d].
    """
    return hidden[:, :size] + fuse(normed(hidden.unflatten(-1, (-1, size))).flatten(-2))


def advance(
    state: torch.Tensor,
    embedded: torch.Tensor,
    token: Linear,
    inner: Linear,
    outer: Linear,
) -> torch.Tensor:
    """The state after another token: s + V u + W_o (silu(W_g u) * W_i u), u =
    [RMSNorm(s); RMSNorm(E[token])].

    Args:
        state: s [rows, d] before it.
        embedded: E[token] [rows, d].
        token: [V; W_g; W_i], the columns that read the token, [d + 2 m, d].
        inner: the same, the columns that read the state, [d + 2 m, d].
        outer: W_o [d, m].
    """
    read = token(normed(embedded)) + inner(normed(state))
    size = state.shape[-1]
    gate, value = read[:, size:].chunk(2, dim=-1)
    return state + read[:, :size] + outer(functional.silu(gate) * value)


def normed(states: torch.Tensor) -> torch.Tensor:
    """RMSNorm without weights, which the following matrices include."""
    return functional.rms_norm(states, states.shape[-1:], eps=1e-6)


def of_experts(
    state: torch.Tensor, down: Linear | None, up: torch.Tensor | None
) -> torch.Tensor:
    """The state of each expert for the LM head, s + A_a B_a s: [rows, r, d]; the state
    alone for rank 1.

    Args:
        state: s [rows, d].
        down: every B_a, [r R, d]; None for rank 1.
        up: A [r, d, R]; None for rank 1.
    """
    if down is None or up is None:
        return state[:, None]
    thin = down(state).unflatten(-1, (len(up), -1)).transpose(0, 1)
    return state[:, None] + torch.bmm(thin, up.to(thin.dtype).mT).transpose(0, 1)


class Recurrence(nn.Module):
    """The recurrence s_t of s_{t-1} and the t-th token, and the low-rank experts on it;
    initially the identity.

    Args:
        size: d.
        inner_size: m, the width of the gated layer.
        rank: r, experts; a single expert is the state itself.
        expert_rank: R, the rank of the experts' differences.
        dtype: of the parameters.
        seed: of the matrices that are not zero; None leaves all zero, for those who
            load them.
        dropout: share of the gated layer that each training step leaves out.
        layers: of the target whose states are read beside the last.
    """

    def __init__(
        self,
        size: int,
        inner_size: int,
        rank: int,
        expert_rank: int,
        dtype: torch.dtype,
        seed: int | None,
        dropout: float = 0.0,
        layers: int = 0,
    ) -> None:
        super().__init__()
        self.dropout = dropout

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype))

        self.token = zeros(size + 2 * inner_size, size)
        self.inner = zeros(size + 2 * inner_size, size)
        self.outer = zeros(size, inner_size)
        self.down = zeros(rank, expert_rank, size) if rank > 1 else None
        self.up = zeros(rank, size, expert_rank) if rank > 1 else None
        self.fuse = zeros(size, (1 + layers) * size) if layers else None
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            random = [
                self.token[size:],
                self.inner[size:],
                *([] if self.down is None else [self.down]),
            ]
            for matrix in random:
                matrix.detach().normal_(std=(2 * size) ** -0.5, generator=generator)

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """s_0 [rows, d] from what is read of the target [rows, (1 + layers) d]."""
        fuse = self.fuse
        if fuse is None:
            return hidden
        return fused(
            hidden.to(fuse.dtype), len(fuse), lambda x: functional.linear(x, fuse)
        )

    def forward(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The state [rows, d] after a token of embeddings [rows, d]."""

        def outer(gated: torch.Tensor) -> torch.Tensor:
            return functional.linear(
                functional.dropout(gated, self.dropout, self.training), self.outer
            )

        dtype = self.token.dtype
        return advance(
            state.to(dtype),
            embedded.to(dtype),
            lambda x: functional.linear(x, self.token),
            lambda x: functional.linear(x, self.inner),
            outer,
        )

    def experts(self, state: torch.Tensor) -> torch.Tensor:
        """[rows, r, d]"""
        thin = None if self.down is None else self.down.flatten(0, 1)
        return of_experts(
            state,
            None if thin is None else lambda s: functional.linear(s, thin),
            self.up,
        )


# Noise of new experts, relative to the norm of their initial weights; a toy mixture
# trained worse with 0.1
NOISE = 0.01


class CPHead(nn.Module):
    """r experts of n factors each over the target's last hidden state e: P_a^(s) =
    softmax(W_a^(s) e) (eq. 6).

    factorised: W_a^(s) = E* T_a^(s). E* is the target's own unembedding and is not
    stored here: n r matrices of d x d,
                whose n r states share one read of E*. T = identity is the target's own
                next-token distribution.
    full:       whole W_a^(s), V x d numbers each (what the paper measured).

    The experts' weights are w = softmax(W_h e) (eq. 7). Position 1 is the token b that
    the target samples itself.

    e does not depend on b. With E the target's input embeddings and x_1 = b:

    none        P(x_1..x_n | e) as above; b only moves the weights, as any token does.
    recurrent   P(x_2..x_n | e, b): a state, s_0 = e, reads x_1, x_2, ... by the same
                matrices (Recurrence). Factors read E* (s_{t-1} + A_a B_a s_{t-1})
                for x_t. The weights are softmax(W_h e + W_b E[b]). Position 1 has no
                factors: its distribution is the target's own.
    """

    def __init__(
        self,
        hidden_size: int,
        positions: int,
        rank: int,
        vocab_size: int | None = None,
        factorised: bool = True,
        dtype: torch.dtype = torch.float32,
        seed: int | None = 0,
        condition: Condition = "none",
        inner_size: int | None = None,
        expert_rank: int = 32,
        dropout: float = 0.0,
        layers: tuple[int, ...] = (),
    ) -> None:
        """Initialise near E*, with noise: equal experts would get equal gradients and
        stay equal.

        Args:
            hidden_size: d.
            positions: n >= 2, the positions of the joint; n - 1 of them are drafted.
            rank: r >= 1; the single expert of rank 1 starts without noise.
            vocab_size: V, needed by the full form, whose classifiers are zero until
                init_classifiers.
            factorised: which form.
            dtype: of the parameters.
            seed: of the noise; None leaves all parameters zero, for those who load
                them.
            condition: what the head reads beside e; W_b starts at zero.
            inner_size, expert_rank, dropout: of a recurrent state (Recurrence; None:
                2 d).
            layers: whose states it reads, too: wherever hidden is an argument, they
                follow e, [rows, (1 + layers) d].
        """
        super().__init__()
        self.positions = positions
        self.rank = rank
        self.factorised = factorised
        self.condition = condition
        self.layers = layers
        self.lead = 0 if condition == "none" else 1

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype))

        self.gate = zeros(rank, hidden_size)
        self.transforms: nn.Parameter | None = None
        self.classifiers: nn.Parameter | None = None
        self.token_gate: nn.Parameter | None = None
        self.recurrence: Recurrence | None = None
        if condition == "recurrent":
            self.token_gate = zeros(rank, hidden_size)
            inner_size = inner_size or 2 * hidden_size
            self.recurrence = Recurrence(
                hidden_size,
                inner_size,
                rank,
                expert_rank,
                dtype,
                seed,
                dropout,
                len(layers),
            )
        elif factorised:
            self.transforms = zeros(positions, rank, hidden_size, hidden_size)
        else:
            assert vocab_size is not None
            self.classifiers = zeros(positions, rank, vocab_size, hidden_size)
        if seed is not None:
            # Not zeros: with equal weights the balance loss would assign every token to
            # expert 0.
            self._fill_with_noise(self.gate, seed)
            if self.transforms is not None:
                noise = self._fill_with_noise(self.transforms, seed + 1)
                noise.add_(torch.eye(hidden_size, device=noise.device))

    @property
    def factors(self) -> int:
        """Positions that the experts predict: all of them, or those after the token
        that is read.
        """
        return self.positions - self.lead

    def init_classifiers(self, unembedding: torch.Tensor, seed: int = 0) -> None:
        """Start every classifier of the full form at E* [V, d] plus noise."""
        assert (
            self.classifiers is not None
            and unembedding.shape == self.classifiers.shape[2:]
        )
        start = unembedding.detach().to(self.classifiers.device)
        self._fill_with_noise(self.classifiers, seed + 1).mul_(
            start.norm(dim=-1, keepdim=True)
        ).add_(start)

    def _fill_with_noise(self, parameter: nn.Parameter, seed: int) -> torch.Tensor:
        """Rows of expected norm NOISE (0 for rank 1), in place: a parameter may be too
        large for a second copy.
        """
        std = NOISE * parameter.shape[-1] ** -0.5 if self.rank > 1 else 0.0
        return parameter.detach().normal_(
            std=std, generator=torch.Generator(parameter.device).manual_seed(seed)
        )

    def read(self, states: TargetStates) -> torch.Tensor:
        """What the head reads of the target, [rows, (1 + layers) d]: the final states,
        and those after its layers.
        """
        return torch.cat(
            [states.final, *(states.layers[layer] for layer in self.layers)], dim=-1
        )

    def context(self, target: Target, tokens: torch.Tensor) -> torch.Tensor | None:
        """The target's embeddings of tokens [rows, positions], if the head reads any."""
        return target.embed(tokens) if self.lead else None

    def log_weights(
        self,
        hidden: torch.Tensor,  # [rows, d], normed
        context: torch.Tensor
        # [rows, 1 or more, d]: E of the sampled token and the tokens after it
        | None = None,
    ) -> torch.Tensor:
        """log w before the first factor (eq. 7): [rows, r]."""
        token = None if self.token_gate is None else self._read(context, 1)[:, 0]
        return log_gate(
            hidden[:, : self.gate.shape[1]], self.gate, token, self.token_gate
        )

    def states(
        self,
        hidden: torch.Tensor,  # [rows, d], normed
        context: torch.Tensor
        # [rows, tokens, d]: E of the sampled token and the tokens after it
        | None = None,
    ) -> torch.Tensor:
        """T_a^(s) e, or the recurrent states of the experts, ready for the target's LM
        head: [rows, factors, r, d].

        Args:
            hidden: e.
            context: a recurrent head needs all but the last of the positions.

        Raises:
            ValueError: if it lacks the tokens that it reads.
        """
        if self.recurrence is None:
            assert self.transforms is not None, "full classifiers have no states"
            return self._project(hidden, self.transforms)
        state = self.recurrence.start(hidden)
        outputs = []
        for embedded in self._read(context, self.factors)[:, : self.factors].unbind(
            dim=1
        ):
            state = self.recurrence(state, embedded)
            outputs.append(self.recurrence.experts(state))
        return torch.stack(outputs, dim=1)

    def _read(self, context: torch.Tensor | None, tokens: int) -> torch.Tensor:
        if context is None or context.shape[1] < tokens:
            raise ValueError(
                f"condition={self.condition!r} reads {tokens} tokens; give their "
                "embeddings"
            )
        return context

    def logits(
        self,
        hidden: torch.Tensor,  # [rows, d], normed
        unembedding: torch.Tensor | None,  # [V, d]; the full form takes None
        bias: torch.Tensor | None = None,  # [V]
        context: torch.Tensor | None = None,  # as for states
    ) -> torch.Tensor:
        """W_a^(s) e + bias, in the dtype of the matrix that was read: [rows, factors,
        r, V].

        Raises:
            ValueError: as states.
        """
        if self.classifiers is not None:
            logits = self._project(hidden, self.classifiers)
            return logits if bias is None else logits + bias
        assert unembedding is not None
        return functional.linear(
            self.states(hidden, context).to(unembedding.dtype), unembedding, bias
        )

    @staticmethod
    def _project(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """All matrices [..., out, d] over hidden [rows, d] in one product: [rows, ..., out]."""
        shape = weights.shape[:-1]
        return functional.linear(
            hidden.to(weights.dtype), weights.flatten(0, -2)
        ).unflatten(-1, shape)

    def log_factors(
        self,
        hidden: torch.Tensor,
        unembedding: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """log P_a^(s)(x) = log_softmax(W_a^(s) e) (eq. 6; arguments as logits): [rows,
        factors, r, V].
        """
        return torch.log_softmax(
            at_least_float32(self.logits(hidden, unembedding, bias, context)), dim=-1
        )

    def log_probs(
        self,
        hidden: torch.Tensor,  # [rows, d], normed
        tokens: torch.Tensor,  # [rows, factors, k] int64, entries of the unembedding
        unembedding: torch.Tensor | None,  # [V, d], or the rows of a draft vocabulary
        bias: torch.Tensor | None = None,  # [V]
        context: torch.Tensor | None = None,  # as for states
        chunk: int = 64,
    ) -> torch.Tensor:
        """log P_a^(s) of k tokens per position: [rows, factors, r, k].

        The logits of all rows never exist at once: the forward pass keeps what the
        backward needs (factorised), or the backward computes each chunk's again (full).
        """
        index = tokens[:, :, None].expand(-1, -1, self.rank, -1)
        if self.factorised:
            assert unembedding is not None
            states = self.states(hidden, context)
            return token_log_probs(
                states.flatten(0, 2), index.flatten(0, 2), unembedding, bias
            ).view(index.shape)

        def of_chunk(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return self.log_factors(hidden, None, bias).gather(-1, index)

        chunks = zip(hidden.split(chunk), index.split(chunk), strict=True)
        if torch.is_grad_enabled():
            return torch.cat(
                [
                    checkpoint(
                        of_chunk, *rows, use_reentrant=False, preserve_rng_state=False
                    )
                    for rows in chunks
                ]
            )
        return torch.cat([of_chunk(*rows) for rows in chunks])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint, by name."""
        return {
            f"cp.{name}": parameter.detach()
            for name, parameter in self.named_parameters()
        }

    @classmethod
    def from_tensors(cls, config: CPConfig, tensors: dict[str, torch.Tensor]) -> CPHead:
        """Build from a checkpoint's tensors (already checked by heads.io), in their dtype."""
        with torch.device("meta"):
            head = cls(
                config.target.hidden_size,
                config.positions,
                config.rank,
                config.target.vocab_size,
                config.factorised,
                tensors["cp.gate"].dtype,
                None,
                config.condition,
                config.inner_size,
                config.expert_rank,
                layers=config.layers,
            )
        head.load_state_dict(
            {name: tensors[f"cp.{name}"] for name in head.state_dict()}, assign=True
        )
        return head


def mixtures(
    # [rows, factors, r, vocabulary], for all positions or all but the first
    logits: torch.Tensor,
    log_weights: torch.Tensor,  # [rows, r] before the first position
    # [rows, positions] columns of the sampled token and the tokens after it; -1 outside
    tokens: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """log q of each position after the first, given the tokens before it: [rows, vocabulary]."""
    for position, raw in enumerate(
        logits.unbind(dim=1), start=tokens.shape[1] - logits.shape[1]
    ):
        factors = raw.float().log_softmax(-1)
        if position:
            yield mixture(log_weights, factors)
        outside = tokens[:, position] < 0
        token = tokens[:, position].clamp(min=0)
        seen = factors.gather(
            -1, token[:, None, None].expand(-1, factors.shape[1], 1)
        ).squeeze(-1)
        log_weights = posterior(log_weights, seen.masked_fill(outside[:, None], 0.0))


def log_gate(
    hidden: torch.Tensor,  # [rows, d], normed
    gate: torch.Tensor,  # [r, d], W_h
    token: torch.Tensor | None = None,  # [rows, d], E[b]
    token_gate: torch.Tensor | None = None,  # [r, d], W_b
) -> torch.Tensor:
    """log w = log_softmax(W_h e + W_b E[b]) (eq. 7, where no token is read): [rows, r]."""
    logits = functional.linear(hidden.to(gate.dtype), gate)
    if token is not None and token_gate is not None:
        logits = logits + functional.linear(token.to(token_gate.dtype), token_gate)
    return torch.log_softmax(at_least_float32(logits), dim=-1)


def draft_in_sequence(
    log_weights: torch.Tensor,  # [rows, r], before the first draft
    drafts: int,
    read: Callable[[int, torch.Tensor | None], torch.Tensor],
    sampling: Sampling | None = None,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Drafts whose logits depend on the draft before, as kernels.cp_mixture.draft_chain
    returns them.

    Args:
        read: the logits [rows, r, vocab] of draft 0, 1, ..., from the draft before it
            [rows] (None for the first).
        log_weights, drafts, sampling, token_ids: as of draft_chain.
    """
    tokens: list[torch.Tensor] = []
    for position in range(drafts):
        logits = read(position, tokens[-1] if tokens else None)
        here = None if sampling is None else sampling.ahead(position)
        token, log_weights = chosen(draft_chain, logits)(
            log_weights, logits[:, None], None, here, token_ids
        )
        tokens.append(token[:, 0])
    return torch.stack(tokens, dim=1)
