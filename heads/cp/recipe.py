# SPDX-License-Identifier: Apache-2.0
"""CP heads: joint likelihood of the next n tokens (eq. 9) and balance of the experts (eq. 10).

The target is frozen, or trained along: from its weights or from scratch, beside its own next-token loss.
Beside the text's tokens, or in their place, the mixture at each position learns the target's own distribution there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vllm_ppd.heads.cp.config import CPConfig, CPOptions
from vllm_ppd.heads.cp.module import CPHead
from vllm_ppd.heads.cp.start import TOKENS, Rows, ridge_start
from vllm_ppd.heads.draft_vocabulary import columns, first_guess, most_frequent
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.training.recipe import Counts, HeadsRecipe, base_group
from vllm_ppd.heads.training.states import Reads
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch, TokenStore
from vllm_ppd.kernels.cp_mixture import balance_loss, conditional_log_probs
from vllm_ppd.kernels.unembedding_loss import rows_a_chunk


class CPRecipe(HeadsRecipe):
    """The served model's own LM head stays the first token's distribution, also where the full recipe trains it.

    As the CP loss takes LM heads for constants, the full recipe's learns from the next token alone, as the paper's
    first head would: the others pull on the states that all share.
    """

    def __init__(self, options: CPOptions, target: Target) -> None:
        super().__init__(options, target)
        self.options = options
        if options.num_speculative_tokens > options.positions - 1:
            raise TrainingError(
                f"--num-speculative-tokens {options.num_speculative_tokens} needs {options.num_speculative_tokens + 1} "
                f"positions; --positions is {options.positions}"
            )
        if options.train_vocab_size > target.vocab_size:
            raise TrainingError(
                f"--train-vocab-size {options.train_vocab_size} is over the model's {target.vocab_size} tokens"
            )
        self.full = options.recipe == "full"
        if options.base_start == "random":
            target.forget(options.seed)
        self.base = target.model if self.full else None
        self.head = CPHead(
            target.hidden_size,
            options.positions,
            options.rank,
            target.vocab_size,
            options.factorised,
            seed=options.seed,
            condition=options.condition,
        ).to(target.device)
        if not options.factorised:
            self.head.init_classifiers(target.unembedding)
        self.token_counts: torch.Tensor | None = None
        self.embedding_rate = 1.0
        # Not buffers: they are made again from the data whenever a run starts.
        self._vocabulary: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None

    @property
    def reads(self) -> Reads:
        return Reads(top_k=self.options.distillation_top_k if self.options.distillation else 0)

    def begin(self, store: TokenStore, fresh: bool) -> None:
        """Choose the draft vocabulary, measure states beside embeddings, and solve the first transforms."""
        target = self.target
        self.token_counts = store.token_counts(target.vocab_size)
        if self.options.train_vocab_size:
            self.use_vocabulary(most_frequent(self.token_counts, self.options.train_vocab_size))
        if self.options.factorised:
            wanted = TOKENS if fresh and self.options.start == "ridge" else store.length
            self.start_from(self._windows(store, wanted), fresh)

    def use_vocabulary(self, token_ids: torch.Tensor) -> None:
        """Train over these tokens [tokens] alone."""
        target = self.target
        token_ids = token_ids.to(target.device)
        bias = None if target.bias is None else target.bias[token_ids]
        self._vocabulary = columns(token_ids, target.vocab_size), target.unembedding[token_ids].contiguous(), bias

    @torch.no_grad()
    def start_from(self, batches: Iterator[Batch], fresh: bool = True) -> None:
        """Solve the first transforms on some windows, of which one is enough for the learning rates alone."""
        rows = self._regressed(batches)
        first = next(rows, None)
        if first is None:
            return
        states, embedded = first
        if self.head.lead:
            sizes = [part.float().square().mean().sqrt() for part in (states, embedded)]
            self.embedding_rate = float(sizes[0] / sizes[1].clamp(min=1e-6))
        if fresh and self.options.start == "ridge":
            ridge_start(self.head, iter([first, *rows]))

    def _windows(self, store: TokenStore, tokens: int) -> Iterator[Batch]:
        """Windows from all over the data, with so many tokens together."""
        count = store.num_windows()
        number = min(count, -(-tokens // store.length))
        for i in tqdm(range(number), desc="reading states to start from", unit=" windows", mininterval=1, delay=1):
            yield store.batch("train", [i * count // number]).to(self.target.device)

    def _regressed(self, batches: Iterator[Batch]) -> Iterator[Rows]:
        n = self.options.positions
        for batch in batches:
            final = self.states(batch).final
            tokens, valid = batch.ahead(n)
            rows = valid.nonzero().squeeze(1)
            if len(rows):  # all of a window may be prompt
                yield (
                    final[rows[:, None] + torch.arange(n, device=rows.device)],
                    self.target.embed(tokens[rows, : n - 1]),
                )

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """What reads embeddings learns as fast as what reads states: in proportion to how much smaller they are."""
        head, tokens_rate = self.head, learning_rate * self.embedding_rate
        parts: list[tuple[list[torch.nn.Parameter | None], float, bool]] = [
            ([head.transforms], learning_rate, True),
            # Whole classifiers are too large for Muon: 5 products of V x d x d each in every step.
            ([head.gate, head.classifiers], learning_rate, False),
            ([head.token, head.previous], tokens_rate, True),
            ([head.token_gate], tokens_rate, False),
        ]
        groups: list[dict[str, Any]] = []
        for parameters, peak, muon in parts:
            kept = [p for p in parameters if p is not None]
            if kept:
                groups.append({"params": kept, "peak": peak, "muon": muon})
        return groups + base_group(self.base, self.options.base_learning_rate)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Counts]:
        options, head, target = self.options, self.head, self.target
        tokens, valid = batch.ahead(options.positions)
        if not valid.any():
            return self.nothing(), {}
        with torch.set_grad_enabled(self.full and torch.is_grad_enabled()):
            states = self.states(batch)
            rows = self.share_of(valid, options.position_share)
            hidden, tokens = states.final[rows], tokens[rows]
        with torch.no_grad():
            context = target.embed(tokens[:, :-1]) if head.lead else None
            place, unembedding, bias = self._vocabulary or (None, target.unembedding, target.bias)
            asked, teacher = self._asked(states, rows, tokens, place)
        log_weights = head.log_weights(hidden, context)
        chunk = max(1, rows_a_chunk(unembedding) // (head.factors * head.rank))
        of_experts = head.log_probs(hidden, asked.clamp(min=0), unembedding, bias, context, chunk)
        known = asked[..., 0] >= 0
        log_probs = conditional_log_probs(log_weights, of_experts, known)
        chain = log_probs[..., 0] * known
        loss = self.options.balance * balance_loss(log_weights) - (1 - options.distillation) * chain.sum(1).mean()
        counts: Counts = {"rows": torch.tensor(len(rows), device=rows.device), "joint": -chain.detach().sum()}
        if self.full:
            next_token = -target.log_probs(hidden, tokens[:, 0])
            loss = loss + next_token.mean()
            counts["next_token"] = next_token.detach().sum()
        if teacher is not None:
            distilled = -(teacher * log_probs[..., 1:]).sum((1, 2))
            loss = loss + options.distillation * distilled.mean()
            counts["distilled"] = distilled.detach().sum()
        counts |= {f"position.{s + 1 + head.lead}": -chain[:, s].detach().sum() for s in range(head.factors)}
        counts["known"] = known.sum()
        counts["experts"] = torch.bincount(log_weights.argmax(-1), minlength=options.rank)
        return loss, counts

    def _asked(
        self, states: Any, rows: torch.Tensor, tokens: torch.Tensor, place: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens whose probabilities are learnt, the text's first, -1 outside the vocabulary: [rows, factors, 1 + k].

        With them the target's probabilities of the k others [rows, factors, k], 0 outside (None: not distilled).
        """
        lead = self.head.lead
        asked = tokens[:, lead:, None]
        teacher = None
        if self.reads.top_k:
            # Position s is sampled from the state s - 1 rows on.
            at = rows[:, None] + torch.arange(lead, self.options.positions, device=rows.device)
            asked = torch.cat([asked, states.top_ids[at]], dim=-1)
            teacher = states.top_log_probs[at].exp()
        if place is not None:
            asked = place[asked]
            teacher = None if teacher is None else teacher * (asked[..., 1:] >= 0)
        return asked, teacher

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        rows, n, first = counts["rows"], self.options.positions, 1 + self.head.lead
        share = [counts[f"experts.{a}"] / rows for a in range(self.options.rank)]
        figures = {
            "joint_nats": round(counts["joint"] / rows, 4),
            "joint_nats_a_token": round(counts["joint"] / rows / self.head.factors, 4),
            "first_position": first,
            "conditional_nats_by_position": [round(counts[f"position.{s}"] / rows, 4) for s in range(first, n + 1)],
            "share_of_experts": [round(value, 3) for value in share],
        }
        if "next_token" in counts:
            figures["next_token_nats"] = round(counts["next_token"] / rows, 4)
        if "distilled" in counts:
            figures["distilled_nats"] = round(counts["distilled"] / rows, 4)
        if self._vocabulary is not None:
            figures["tokens_in_vocabulary"] = round(counts["known"] / rows / self.head.factors, 4)
        return figures

    def prepare_output(self, store: TokenStore, folder: Path) -> None:
        self.token_counts = store.token_counts(self.target.vocab_size)
        if self.full:
            self.target.save(folder / "base")

    def config(self) -> CPConfig:
        draft_vocab_size = self.options.train_vocab_size or None
        if draft_vocab_size is None and self.token_counts is not None:
            draft_vocab_size = first_guess(self.token_counts)
        return CPConfig(
            **self.target.description(),
            positions=self.options.positions,
            rank=self.options.rank,
            factorised=self.options.factorised,
            condition=self.options.condition,
            num_speculative_tokens=self.options.num_speculative_tokens,
            dtype=self.options.stored_dtype,
            token_counts=self.token_counts is not None,
            draft_vocab_size=draft_vocab_size,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        counts = {} if self.token_counts is None else {"token_counts": self.token_counts}
        return self.head.tensors() | counts


RECIPE = CPRecipe
