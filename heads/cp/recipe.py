# SPDX-License-Identifier: Apache-2.0
"""CP heads: joint likelihood of the next n tokens (eq. 9) and balance of the experts (eq. 10), target frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.cp.module import CPHead
from vllm_ppd.heads.cp.options import CPOptions
from vllm_ppd.heads.draft_vocabulary import first_guess
from vllm_ppd.heads.training import TrainingError
from vllm_ppd.heads.training.recipe import Counts, Recipe
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch, TokenStore
from vllm_ppd.kernels.cp_mixture import balance_loss, chain_log_likelihood, joint_log_likelihood
from vllm_ppd.kernels.unembedding_loss import rows_a_chunk, token_log_probs


class CPRecipe(Recipe):
    """Head-only training: the served model's own LM head stays its first-token distribution."""

    def __init__(self, options: CPOptions, target: Target) -> None:
        super().__init__(options, target)
        self.options = options
        self.token_counts: torch.Tensor | None = None
        if options.num_speculative_tokens > options.positions - 1:
            raise TrainingError(
                f"--num-speculative-tokens {options.num_speculative_tokens} needs {options.num_speculative_tokens + 1} "
                f"positions; --positions is {options.positions}"
            )
        self.head = CPHead(
            target.hidden_size,
            options.positions,
            options.rank,
            target.vocab_size,
            options.factorised,
            seed=options.seed,
        ).to(target.device)
        if not options.factorised:
            self.head.init_classifiers(target.unembedding)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Counts]:
        with torch.no_grad():
            hidden = self.states(batch).final
        tokens, valid = batch.ahead(self.options.positions)
        hidden, tokens = hidden[valid], tokens[valid]
        log_weights = self.head.log_weights(hidden)
        joint, chain = self._likelihood(hidden, tokens, log_weights)
        balance = balance_loss(log_weights)
        counts: Counts = {"rows": torch.tensor(len(hidden), device=hidden.device), "joint": -joint.detach().sum()}
        counts |= {f"position.{s + 1}": -chain[:, s].detach().sum() for s in range(self.options.positions)}
        counts["experts"] = torch.bincount(log_weights.argmax(-1), minlength=self.options.rank)
        return -joint.mean() + self.options.balance * balance, counts

    def _likelihood(
        self, hidden: torch.Tensor, tokens: torch.Tensor, log_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        target, head = self.target, self.head
        if not head.factorised:
            chunk = max(1, rows_a_chunk(target.unembedding) // (head.positions * head.rank))
            return head.log_likelihood(hidden, tokens, None, target.bias, chunk)
        states = head.states(hidden)  # [rows, n, r, d]
        asked = tokens[..., None].expand(-1, -1, head.rank)
        observed = token_log_probs(states.flatten(0, 2), asked.flatten(), target.unembedding, target.bias)
        observed = observed.view(asked.shape)
        return joint_log_likelihood(log_weights, observed), chain_log_likelihood(log_weights, observed)

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        rows, n = counts["rows"], self.options.positions
        share = [counts[f"experts.{a}"] / rows for a in range(self.options.rank)]
        return {
            "joint_nats": round(counts["joint"] / rows, 4),
            "joint_nats_a_token": round(counts["joint"] / rows / n, 4),
            "conditional_nats_by_position": [round(counts[f"position.{s + 1}"] / rows, 4) for s in range(n)],
            "share_of_experts": [round(value, 3) for value in share],
        }

    def prepare_output(self, store: TokenStore, folder: Path) -> None:
        self.token_counts = store.token_counts(self.target.vocab_size)

    def config(self) -> CPConfig:
        return CPConfig(
            **self.target.description(),
            positions=self.options.positions,
            rank=self.options.rank,
            factorised=self.options.factorised,
            num_speculative_tokens=self.options.num_speculative_tokens,
            dtype=self.options.stored_dtype,
            token_counts=self.token_counts is not None,
            draft_vocab_size=None if self.token_counts is None else first_guess(self.token_counts),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        counts = {} if self.token_counts is None else {"token_counts": self.token_counts}
        return self.head.tensors() | counts
