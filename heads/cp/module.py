# SPDX-License-Identifier: Apache-2.0
"""CP head: the next n tokens from one hidden state, as a rank-r canonical decomposition of their joint probability."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vllm_ppd.kernels.cp_mixture import at_least_float32, chain_log_likelihood, draft_chain, joint_log_likelihood
from vllm_ppd.kernels.dispatch import chosen
from vllm_ppd.kernels.sampling import Sampling

NOISE = 0.01  # of fresh experts, relative to the norm of what they start from; with 0.1 a toy mixture trained worse


def log_gate(
    hidden: torch.Tensor,  # [rows, d], normed
    gate: torch.Tensor,  # [r, d], W_h
) -> torch.Tensor:
    """log w = log_softmax(W_h e) (eq. 7): [rows, r]."""
    return torch.log_softmax(at_least_float32(functional.linear(hidden.to(gate.dtype), gate)), dim=-1)


class CPHead(nn.Module):
    """r experts of n factors each over the target's last hidden state e: P_a^(s) = softmax(W_a^(s) e) (eq. 6).

    factorised: W_a^(s) = E* T_a^(s). E* is the target's own unembedding and is not stored here: n r matrices of d x d,
                whose n r states share one read of E*. T = identity is the target's own next-token distribution.
    full:       whole W_a^(s), V x d numbers each (what the paper measured).

    The experts' weights are w = softmax(W_h e) (eq. 7). Position 1 is the token that the target samples itself.
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
    ) -> None:
        """Start near E*, with noise: equal experts would get equal gradients and stay equal.

        Args:
            hidden_size: d.
            positions: n >= 2, the positions of the joint; n - 1 of them are drafted.
            rank: r >= 1; the single expert of rank 1 starts without noise.
            vocab_size: V, needed by the full form, whose classifiers are zero until init_classifiers.
            factorised: which form.
            dtype: of the parameters.
            seed: of the noise; None leaves all parameters zero, for those who load them.

        Raises:
            ValueError: if rank < 1, positions < 2, or the full form lacks vocab_size.
        """
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank={rank} is below 1; rank 1 is independent heads")
        if positions < 2:
            raise ValueError(f"positions={positions} is below 2; position 1 is the target's own token")
        if not factorised and vocab_size is None:
            raise ValueError("full classifiers are [vocab_size, hidden_size] each; give vocab_size")
        self.positions, self.rank, self.factorised = positions, rank, factorised
        rows = hidden_size if factorised or vocab_size is None else vocab_size
        weights = nn.Parameter(torch.zeros(positions, rank, rows, hidden_size, dtype=dtype))
        self.gate = nn.Parameter(torch.zeros(rank, hidden_size, dtype=dtype))
        self.transforms = weights if factorised else None
        self.classifiers = None if factorised else weights
        if seed is not None:
            # Not zeros: equal weights would count every token for expert 0 in the balance loss.
            self._fill_with_noise(self.gate, seed)
            if factorised:
                self._fill_with_noise(weights, seed + 1).add_(torch.eye(hidden_size, device=weights.device))

    def init_classifiers(self, unembedding: torch.Tensor, seed: int = 0) -> None:
        """Start every classifier of the full form at E* [V, d] plus noise.

        Raises:
            ValueError: if the head is factorised or E* has another shape.
        """
        if self.classifiers is None:
            raise ValueError("a factorised head has no classifiers; it starts at the unembedding as it is")
        if unembedding.shape != self.classifiers.shape[2:]:
            raise ValueError(f"unembedding is {[*unembedding.shape]}, classifiers are {[*self.classifiers.shape[2:]]}")
        start = unembedding.detach().to(self.classifiers.device)
        self._fill_with_noise(self.classifiers, seed + 1).mul_(start.norm(dim=-1, keepdim=True)).add_(start)

    def _fill_with_noise(self, parameter: nn.Parameter, seed: int) -> torch.Tensor:
        """Rows of expected norm NOISE (0 for rank 1), in place: a parameter may be too large for a second copy."""
        std = NOISE * parameter.shape[-1] ** -0.5 if self.rank > 1 else 0.0
        return parameter.detach().normal_(std=std, generator=torch.Generator(parameter.device).manual_seed(seed))

    def log_weights(
        self,
        hidden: torch.Tensor,  # [rows, d], normed
    ) -> torch.Tensor:
        """log w = log_softmax(W_h e) (eq. 7): [rows, r]."""
        return log_gate(hidden, self.gate)

    def states(
        self,
        hidden: torch.Tensor,  # [rows, d], normed
        positions: slice | None = None,  # of 0..n-1 (None: all)
    ) -> torch.Tensor:
        """T_a^(s) e, ready for the target's LM head: [rows, n, r, d], n the positions asked for.

        Raises:
            ValueError: if the head is not factorised.
        """
        if self.transforms is None:
            raise ValueError("full classifiers have no states; ask for logits")
        return self._project(hidden, self.transforms, positions)

    def logits(
        self,
        hidden: torch.Tensor,  # [rows, d], normed
        unembedding: torch.Tensor | None,  # [V, d]; the full form takes None
        bias: torch.Tensor | None = None,  # [V]
        positions: slice | None = None,  # of 0..n-1 (None: all)
    ) -> torch.Tensor:
        """W_a^(s) e + bias, in the dtype of the matrix that was read: [rows, n, r, V].

        Raises:
            ValueError: if a factorised head is given no unembedding.
        """
        if self.classifiers is not None:
            logits = self._project(hidden, self.classifiers, positions)
            return logits if bias is None else logits + bias
        if unembedding is None:
            raise ValueError("a factorised head reads the target's unembedding; give it")
        return functional.linear(self.states(hidden, positions).to(unembedding.dtype), unembedding, bias)

    @staticmethod
    def _project(hidden: torch.Tensor, weights: torch.Tensor, positions: slice | None) -> torch.Tensor:
        """All chosen matrices [n, r, out, d] over hidden [rows, d] in one product: [rows, n, r, out]."""
        used = weights if positions is None else weights[positions]
        return functional.linear(hidden.to(weights.dtype), used.flatten(0, 2)).unflatten(-1, used.shape[:3])

    def log_factors(
        self, hidden: torch.Tensor, unembedding: torch.Tensor | None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """log P_a^(s)(x) = log_softmax(W_a^(s) e) (eq. 6; arguments as logits): [rows, n, r, V]."""
        return torch.log_softmax(at_least_float32(self.logits(hidden, unembedding, bias)), dim=-1)

    def log_likelihood(
        self,
        hidden: torch.Tensor,  # [rows, d], normed
        tokens: torch.Tensor,  # [rows, n] int64, the n tokens that follow
        unembedding: torch.Tensor | None,  # [V, d]
        bias: torch.Tensor | None = None,  # [V]
        chunk: int = 64,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The joint's log-likelihood (eq. 9) and its chain: log P(x_s | x_1..x_{s-1}), which sum up to it.

        At most chunk n r V logits exist at a time: the backward pass computes each chunk's again.

        Returns:
            ([rows], [rows, n]), in nats.
        """

        def likelihood(hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            index = tokens[:, :, None, None].expand(-1, -1, self.rank, 1)
            observed = self.log_factors(hidden, unembedding, bias).gather(-1, index).squeeze(-1)
            weights = self.log_weights(hidden)
            return joint_log_likelihood(weights, observed), chain_log_likelihood(weights, observed)

        parts = zip(hidden.split(chunk), tokens.split(chunk), strict=True)
        if torch.is_grad_enabled():
            found = [checkpoint(likelihood, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        else:
            found = [likelihood(*part) for part in parts]
        joints, chains = zip(*found, strict=True)
        return torch.cat(joints), torch.cat(chains)

    def draft(
        self,
        hidden: torch.Tensor,  # [rows, d], normed: the state that produced first_token
        first_token: torch.Tensor,  # [rows] int64, position 1, sampled by the target
        unembedding: torch.Tensor | None,  # [V, d]
        bias: torch.Tensor | None = None,  # [V]
        sampling: Sampling | None = None,  # of each row
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft positions 2 to n, as kernels.cp_mixture.draft_chain: ([rows, n - 1], [rows, n - 1, V])."""
        with torch.no_grad():
            logits = self.logits(hidden, unembedding, bias)
            draft = chosen(draft_chain, logits)
            return draft(self.log_weights(hidden), logits, first_token, sampling, generator)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint, by name."""
        return {f"cp.{name}": parameter.detach() for name, parameter in self.named_parameters()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> CPHead:
        """Build from a checkpoint's tensors (already checked by heads.checkpoint), in their dtype."""
        name = "transforms" if "cp.transforms" in tensors else "classifiers"
        weights = tensors[f"cp.{name}"]
        positions, rank, rows, hidden_size = weights.shape
        head = cls(hidden_size, positions, rank, rows, "cp.transforms" in tensors, weights.dtype, seed=None)
        head.gate = nn.Parameter(tensors["cp.gate"])
        setattr(head, name, nn.Parameter(weights))
        return head
