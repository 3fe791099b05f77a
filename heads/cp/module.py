# SPDX-License-Identifier: Apache-2.0
"""CP head: the next n tokens from one hidden state, as a rank-r canonical decomposition of
their joint probability, or by a recurrent state that reads each token.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.module import Linear, NamedWeights, in_chunks, torch_linear
from vllm_ppd.heads.training.target import Target, TargetStates
from vllm_ppd.kernels.cp_mixture import (
    at_least_float32,
    conditional_log_probs,
    draft_chain,
)
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import Sampling
from vllm_ppd.kernels.unembedding_loss import capped, token_log_probs

# Noise of new experts, relative to the norm of their initial weights; a toy mixture
# trained worse with 0.1
NOISE = 0.01


def normed(states: Tensor) -> Tensor:
    """RMSNorm without weights, which the following matrices include."""
    return functional.rms_norm(
        states,
        states.shape[-1:],
        eps=1e-6,
    )


class Recurrence:
    """The recurrence s_t of s_{t-1} and the t-th token, and the low-rank experts on it.

    Args:
        tensors: of the heads, by the configuration's names: V, W_g and W_i as one
            matrix, in two parts `token` and `inner` [d + 2 m, d] for the columns that
            read the token and the state; W_o as `outer` [d, m]; with several experts
            B as `down` [r, R, d] and A as `up` [r, d, R]; with layers W as `fuse`
            [d, (1 + layers) d].
        linear: makes a function y = W x from a matrix W [out, in].
        dropout: share of the gated layer to leave out.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        linear: Callable[[Tensor], Linear],
        dropout: float = 0.0,
    ) -> None:
        matrices = {
            name.removeprefix("cp.recurrence."): tensor
            for name, tensor in tensors.items()
        }
        self.dropout = dropout
        self.size, self.width = matrices["outer"].shape
        self.token = linear(matrices["token"])
        self.inner = linear(matrices["inner"])
        self.outer = linear(matrices["outer"])
        self.fuse = linear(matrices["fuse"]) if "fuse" in matrices else None
        self.up = matrices.get("up")
        if self.up is not None:
            self.down = linear(matrices["down"].flatten(0, 1))

    def start(self, hidden: Tensor) -> Tensor:
        """s_0 = e + W [RMSNorm(e); RMSNorm(h_l) of each layer l] [rows, d], or e.

        Args:
            hidden: e and the states after some layers, [rows, (1 + layers) d].
        """
        if self.fuse is None:
            return hidden
        states = hidden.unflatten(-1, (-1, self.size))
        return states[:, 0] + self.fuse(normed(states).flatten(-2))

    def advance(self, state: Tensor, embedded: Tensor) -> Tensor:
        """The state after another token: s + V u + W_o (silu(W_g u) * W_i u), u =
        [RMSNorm(s); RMSNorm(E[token])].

        Args:
            state: s [rows, d] before it.
            embedded: E[token] [rows, d].
        """
        read = self.token(normed(embedded)) + self.inner(normed(state))
        skip, gate, value = read.tensor_split([-2 * self.width, -self.width], -1)
        gated = functional.silu(gate) * value
        if self.dropout:
            gated = functional.dropout(gated, self.dropout)
        return state + self.joined(skip, self.outer(gated))

    def joined(self, skip: Tensor, gated: Tensor) -> Tensor:
        """V u + W_o (...) [rows, d] from both products."""
        return skip + gated

    def experts(self, state: Tensor) -> Tensor:
        """The state of each expert for the LM head, s + A_a B_a s [rows, r, d]; a
        single expert is the state itself.
        """
        if self.up is None:
            return state[:, None]
        thin = self.down(state).unflatten(-1, (len(self.up), -1))
        up = self.up.to(thin.dtype)
        apart = torch.bmm(thin.transpose(0, 1), up.mT)
        return state[:, None] + apart.transpose(0, 1)


class CPHead(NamedWeights):
    """r experts of n factors each over the target's last hidden state e: P_a^(s) =
    softmax(W_a^(s) e) (eq. 6).

    factorized: W_a^(s) = E* T_a^(s). E* is the target's own unembedding and is not
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

    Where hidden is an argument, it is [rows, (1 + layers) d]: e, normed, and the states
    after the head's layers. Where context is one, it is [rows, factors, d], the
    embeddings of the sampled token and the tokens after it, which a recurrent head
    reads (else None).

    Args:
        config: of the heads.
        tensors: by the configuration's names.
        dropout: share of a recurrent state's gated layer that each training step leaves
            out.
    """

    def __init__(
        self,
        config: CPConfig,
        tensors: Mapping[str, Tensor],
        dropout: float = 0.0,
    ) -> None:
        super().__init__(config, tensors)
        self.positions = config.positions
        self.rank = config.rank
        # Positions that the experts predict: all, or those after the token that is read
        self.factors = config.factors
        self.lead = config.positions - config.factors
        self.layers = config.layers
        self.dropout = dropout

    def weight(self, name: str) -> Tensor | None:
        """A parameter by its name without "cp.", if this form of the head has it."""
        return self.weights.get(f"cp/{name}")

    @property
    def gate(self) -> Tensor:
        """W_h [r, d]."""
        return self.weights["cp/gate"]

    def read(self, states: TargetStates) -> Tensor:
        """What the head reads of the target, [rows, (1 + layers) d]: the final states,
        and those after its layers.
        """
        layers = [states.layers[layer] for layer in self.layers]
        return torch.cat([states.final, *layers], dim=-1)

    def context(self, target: Target, tokens: Tensor) -> Tensor | None:
        """The target's embeddings of tokens [rows, positions], if the head reads any."""
        return target.embed(tokens) if self.lead else None

    def log_weights(
        self, hidden: Tensor, context: Tensor | None = None
    ) -> Tensor:
        """log w before the first factor (eq. 7): [rows, r]."""
        token = None if context is None else context[:, 0]
        final = hidden[:, : self.gate.shape[1]]
        return log_gate(
            final,
            self.gate,
            token,
            self.weight("token_gate"),
        )

    def recurrence(self) -> Recurrence:
        """The recurrence with the current parameters."""
        dropout = self.dropout if self.training else 0.0
        return Recurrence(self.tensors(), torch_linear, dropout)

    def states(self, hidden: Tensor, context: Tensor | None = None) -> Tensor:
        """T_a^(s) e, or the recurrent states of the experts, ready for the target's LM
        head: [rows, factors, r, d].
        """
        transforms = self.weight("transforms")
        if transforms is not None:
            return _project(hidden, transforms)
        assert context is not None, "a recurrent head reads tokens"
        recurrence = self.recurrence()
        dtype = self.gate.dtype
        state = recurrence.start(hidden.to(dtype))
        outputs = []
        for embedded in context.to(dtype).unbind(dim=1):
            state = recurrence.advance(state, embedded)
            outputs.append(recurrence.experts(state))
        return torch.stack(outputs, dim=1)

    def logits(
        self,
        hidden: Tensor,
        unembedding: Tensor | None,  # [V, d]; the full form takes None
        bias: Tensor | None = None,  # [V]
        context: Tensor | None = None,
    ) -> Tensor:
        """W_a^(s) e + bias, in the dtype of the matrix that was read: [rows, factors,
        r, V].
        """
        classifiers = self.weight("classifiers")
        if classifiers is not None:
            logits = _project(hidden, classifiers)
            return logits if bias is None else logits + bias
        assert unembedding is not None
        states = self.states(hidden, context).to(unembedding.dtype)
        return capped(functional.linear(states, unembedding, bias), self.cap)

    def log_probs(
        self,
        hidden: Tensor,
        tokens: Tensor,  # [rows, factors, k] int64, entries of the unembedding
        unembedding: Tensor | None,  # [V, d], or the rows of a draft vocabulary
        bias: Tensor | None = None,  # [V]
        context: Tensor | None = None,
        chunk: int = 64,
    ) -> Tensor:
        """log P_a^(s) = log_softmax(W_a^(s) e) of k tokens per position (eq. 6): [rows,
        factors, r, k].

        The logits of all rows never exist at once: the forward pass keeps what the
        backward needs (factorized), or the backward computes each chunk's again (full).
        """
        index = tokens[:, :, None].expand(
            -1,
            -1,
            self.rank,
            -1,
        )
        if self.weight("classifiers") is None:
            assert unembedding is not None
            states = self.states(hidden, context).flatten(0, 2)
            flat = token_log_probs(
                states,
                index.flatten(0, 2),
                unembedding,
                bias,
                self.cap,
            )
            return flat.view(index.shape)

        def of_chunk(hidden: Tensor, index: Tensor) -> Tensor:
            logits = at_least_float32(self.logits(hidden, None, bias))
            return logits.log_softmax(-1).gather(-1, index)

        return in_chunks(of_chunk, chunk, hidden, index)


def initial_tensors(
    config: CPConfig, unembedding: Tensor, seed: int
) -> dict[str, Tensor]:
    """Weights near E*, with noise: equal experts would get equal gradients and stay
    equal. The single expert of rank 1 has no noise. A recurrent state starts as the
    identity.

    Args:
        config: of the heads.
        unembedding: E* [V, d], at which full classifiers start.
        seed: of the noise.
    """
    size = config.target.hidden_size
    tensors = {
        name: torch.zeros(shape) for name, shape in config.shapes().items()
    }

    std = NOISE * size**-0.5 if config.rank > 1 else 0.0
    generator = torch.Generator().manual_seed(seed)
    # Not zeros: with equal weights the balance loss would assign every token to expert
    # 0.
    tensors["cp.gate"].normal_(std=std, generator=generator)
    if config.condition == "recurrent":
        std = (2 * size) ** -0.5
        generator.manual_seed(seed)
        for name in ("token", "inner"):
            gated = tensors[f"cp.recurrence.{name}"][size:]
            gated.normal_(std=std, generator=generator)
        if config.rank > 1:
            tensors["cp.recurrence.down"].normal_(std=std, generator=generator)
        return tensors
    # In place: classifiers may be too large for a second copy.
    generator.manual_seed(seed + 1)
    if config.factorized:
        transforms = tensors["cp.transforms"].normal_(
            std=std, generator=generator
        )
        transforms.add_(torch.eye(size))
    else:
        start = unembedding.detach().float().cpu()
        classifiers = tensors["cp.classifiers"].normal_(
            std=std, generator=generator
        )
        classifiers.mul_(start.norm(dim=-1, keepdim=True)).add_(start)
    return tensors


def _project(hidden: Tensor, weights: Tensor) -> Tensor:
    """All matrices [..., out, d] over hidden [rows, d] in one product: [rows, ..., out]."""
    matrix = weights.flatten(0, -2)
    product = functional.linear(hidden.to(matrix.dtype), matrix)
    return product.unflatten(-1, weights.shape[:-1])


def mixtures(
    # [rows, factors, r, vocabulary], for all positions or all but the first
    logits: Tensor,
    log_weights: Tensor,  # [rows, r] before the first position
    # [rows, positions] columns of the sampled token and the tokens after it; -1 outside
    tokens: Tensor,
) -> Tensor:
    """log q of each position after the first, given the tokens before it: [rows,
    positions - 1, vocabulary].
    """
    factors = logits.float().log_softmax(-1)
    lead = tokens.shape[1] - logits.shape[1]
    token = tokens[:, lead:, None]
    seen = torch.take_along_dim(factors, token.clamp(min=0)[..., None], dim=-1)
    seen = seen.squeeze(-1).where(token >= 0, 0.0)
    return conditional_log_probs(log_weights, factors, seen)[:, 1 - lead :]


def log_gate(
    hidden: Tensor,  # [rows, d], normed
    gate: Tensor,  # [r, d], W_h
    token: Tensor | None = None,  # [rows, d], E[b]
    token_gate: Tensor | None = None,  # [r, d], W_b
) -> Tensor:
    """log w = log_softmax(W_h e + W_b E[b]) (eq. 7, where no token is read): [rows, r]."""
    logits = functional.linear(hidden.to(gate.dtype), gate)
    if token is not None and token_gate is not None:
        logits = logits + functional.linear(
            token.to(token_gate.dtype), token_gate
        )
    return torch.log_softmax(at_least_float32(logits), dim=-1)


def draft_in_sequence(
    log_weights: Tensor,  # [rows, r], before the first draft
    drafts: int,
    read: Callable[[int, Tensor | None], Tensor],
    sampling: Sampling | None,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Drafts whose logits depend on the draft before, as kernels.cp_mixture.draft_chain
    returns them.

    Args:
        read: the logits [rows, r, vocab] of draft 0, 1, ..., from the draft before it
            [rows] (None for the first).
        log_weights, drafts, sampling, token_ids: as of draft_chain.
    """
    tokens: list[Tensor] = []
    for position in range(drafts):
        logits = read(position, tokens[-1] if tokens else None)
        here = None if sampling is None else sampling.ahead(position)
        token, log_weights = chosen(draft_chain, logits)(
            log_weights, logits[:, None], None, here, token_ids
        )
        tokens.append(token[:, 0])
    return torch.stack(tokens, dim=1)
