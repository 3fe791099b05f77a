# SPDX-License-Identifier: Apache-2.0
"""CP heads: joint likelihood of the next n tokens (eq. 9) and balance of the experts
(eq. 10).

The target is frozen, or trained with the head: from its weights or from scratch, with
its own next-token loss. The mixture at each position learns the text's tokens, the
target's own distribution there, or both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tqdm import tqdm

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.cp.config import CPConfig, Experts
from vllm_ppd.heads.cp.module import CPHead, Recurrence, mixtures, normed
from vllm_ppd.heads.draft_vocabulary import columns, first_guess, most_frequent
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.training.recipe import Counts, HeadsRecipe, accepted_counts
from vllm_ppd.heads.training.states import Reads
from vllm_ppd.heads.training.target import Target, TargetStates
from vllm_ppd.heads.training.tokens import Batch, TokenStore
from vllm_ppd.kernels.cp_mixture import balance_loss, conditional_log_probs
from vllm_ppd.kernels.unembedding_loss import rows_a_chunk

PENALTY = 1e-3  # of the ridge regression, relative to the mean square of its inputs
TOKENS = 1 << 16  # most tokens that the regression reads

# States [rows, positions, d], of which the first is read and the others are predicted,
# and embeddings [rows, positions - 1, d] of the tokens sampled from all states but the
# last.
Rows = tuple[torch.Tensor, torch.Tensor]


class CPRecipe(HeadsRecipe):
    """The training of a CP head; the model's own LM head gives the first token, even if
    the full recipe trains it.

    The CP loss treats LM heads as constants, so the full recipe's learns from the next
    token alone, as the paper's first head does; the other heads' gradients go to the
    states that all share.
    """

    def __init__(self, options: Any, target: Target) -> None:
        super().__init__(options, target)
        if options.train_vocab_size > target.vocab_size:
            raise TrainingError(
                f"--train-vocab-size {options.train_vocab_size} is more than the "
                f"model's {target.vocab_size} tokens"
            )
        if options.layers and options.layers[-1] >= target.num_layers:
            raise TrainingError(
                f"--layers {options.layers[-1]} is outside 1..{target.num_layers - 1}"
            )
        if options.base_start == "random":
            target.forget(options.seed)
        self.head = self.make_head().to(target.device)
        self.token_counts: torch.Tensor | None = None
        self.embedding_rate = 1.0
        # Not buffers: each run computes them from the data when it starts.
        self._vocabulary: (
            tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None
        ) = None

    def make_head(self) -> Any:
        """The untrained head: a CPHead, or one with its interface."""
        options = self.options
        target = self.target
        head = CPHead(
            target.hidden_size,
            options.positions,
            options.rank,
            target.vocab_size,
            options.factorised,
            seed=options.seed,
            condition=options.condition,
            inner_size=options.inner_size,
            expert_rank=options.expert_rank,
            dropout=options.dropout,
            layers=options.layers,
        )
        if not options.factorised:
            head.init_classifiers(target.unembedding)
        return head

    reach_option = "--positions"

    @property
    def reach(self) -> dict[str, int]:
        return {f"a joint of {self.options.positions} tokens": self.options.positions}

    @property
    def reads(self) -> Reads:
        return Reads(
            exits=self.options.layers,
            top_k=self.options.distillation_top_k if self.options.distillation else 0,
        )

    def begin(self, store: TokenStore, fresh: bool) -> None:
        """Choose the draft vocabulary, compare the scales of states and embeddings, and
        solve the first transforms.
        """
        target = self.target
        self.token_counts = store.token_counts(target.vocab_size)
        if self.options.train_vocab_size:
            self.use_vocabulary(
                most_frequent(self.token_counts, self.options.train_vocab_size)
            )
        if self.options.factorised:
            self.start_from(self._windows(store, TOKENS), fresh)

    def use_vocabulary(self, token_ids: torch.Tensor) -> None:
        """Train over these tokens [tokens] alone."""
        target = self.target
        token_ids = token_ids.to(target.device)
        bias = None if target.bias is None else target.bias[token_ids]
        self._vocabulary = (
            columns(token_ids, target.vocab_size),
            target.unembedding[token_ids].contiguous(),
            bias,
        )

    @torch.no_grad()
    def start_from(self, batches: Iterator[Batch], fresh: bool = True) -> None:
        """Solve the first transforms on some windows, of which learning rates alone
        need the first with responses.
        """
        rows = self._regressed(batches)
        first = next(rows, None)
        if first is None:
            return
        states, embedded = first
        if self.head.lead:
            sizes = [
                block.float().square().mean().sqrt() for block in (states, embedded)
            ]
            self.embedding_rate = float(sizes[0] / sizes[1].clamp(min=1e-6))
        if fresh and self.options.start == "ridge":
            self.solve(iter([first, *rows]))

    def solve(self, rows: Iterator[Rows]) -> None:
        """Set the first weights by a ridge regression."""
        ridge_start(self.head, rows)

    def _windows(self, store: TokenStore, tokens: int) -> Iterator[Batch]:
        """Windows from all over the data, with so many tokens together."""
        count = store.num_windows()
        number = min(count, -(-tokens // store.length))
        for i in tqdm(
            range(number),
            desc="reading states for the start",
            unit=" windows",
            mininterval=1,
            delay=1,
        ):
            yield store.batch("train", [i * count // number]).to(self.target.device)

    def _regressed(self, batches: Iterator[Batch]) -> Iterator[Rows]:
        n = self.options.positions
        for batch in batches:
            final = self.states(batch).final
            tokens, valid = batch.ahead(n)
            rows = valid.nonzero().squeeze(1)
            if len(rows):  # a window may consist of prompt tokens only
                yield (
                    final[rows[:, None] + torch.arange(n, device=rows.device)],
                    self.target.embed(tokens[rows, : n - 1]),
                )

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """Matrices that read embeddings get a learning rate scaled by how much smaller
        embeddings are than states.
        """
        head = self.head
        tokens_rate = learning_rate * self.embedding_rate
        recurrence = (
            [] if head.recurrence is None else list(head.recurrence.parameters())
        )
        groups: list[dict[str, Any]] = [
            {
                "params": [head.transforms, *recurrence],
                "peak": learning_rate,
                "muon": True,
            },
            # Full classifiers are too large for Muon: 5 products of V x d x d each in
            # every step.
            {
                "params": [head.gate, head.classifiers],
                "peak": learning_rate,
                "muon": False,
            },
            {"params": [head.token_gate], "peak": tokens_rate, "muon": False},
        ]
        for group in groups:
            group["params"] = [
                parameter for parameter in group["params"] if parameter is not None
            ]
        return [group for group in groups if group["params"]] + self.base_groups()

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Counts]:
        options = self.options
        head = self.head
        target = self.target
        tokens, valid = batch.ahead(options.positions)
        if not valid.any():
            return self.nothing(), {}
        with torch.set_grad_enabled(self.full and torch.is_grad_enabled()):
            states = self.states(batch)
            rows = self.share_of(valid, options.position_share)
            hidden = head.read(states)[rows]
            tokens = tokens[rows]
        with torch.no_grad():
            context = head.context(target, tokens[:, :-1])
            place, unembedding, bias = self._vocabulary or (
                None,
                target.unembedding,
                target.bias,
            )
            asked, teacher = self._asked(states, rows, tokens, place)
        log_weights = head.log_weights(hidden, context)
        chunk = max(1, rows_a_chunk(unembedding) // (head.factors * head.rank))
        of_experts = head.log_probs(
            hidden, asked.clamp(min=0), unembedding, bias, context, chunk
        )
        known = asked[..., 0] >= 0
        log_probs = conditional_log_probs(log_weights, of_experts, known)
        chain = log_probs[..., 0] * known
        loss = (
            self.options.balance * balance_loss(log_weights)
            - (1 - options.distillation) * chain.sum(1).mean()
        )
        counts: Counts = {
            "rows": torch.tensor(len(rows), device=rows.device),
            "joint": -chain.detach().sum(),
        }
        if self.full:
            next_token = -target.log_probs(states.final[rows], tokens[:, 0])
            loss = loss + next_token.mean()
            counts["next_token"] = next_token.detach().sum()
        if teacher is not None:
            distilled = -(teacher * log_probs[..., 1:]).sum(2)
            decay = options.decay ** torch.arange(head.factors, device=rows.device)
            loss = loss + options.distillation * (distilled.mean(0) * decay).sum()
            counts["distilled"] = distilled.detach().sum()
        counts |= {
            f"position.{s + 1 + head.lead}": -chain[:, s].detach().sum()
            for s in range(head.factors)
        }
        counts["known"] = known.sum()
        counts["experts"] = torch.bincount(
            log_weights.argmax(-1), minlength=options.rank
        )
        if not self.training:
            counts |= self._accepted(states, rows, hidden, tokens, log_weights, context)
        return loss, counts

    def _accepted(
        self,
        states: TargetStates,
        rows: torch.Tensor,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        log_weights: torch.Tensor,
        context: torch.Tensor | None,
    ) -> Counts:
        """How many greedy drafts in a row are the target's greedy tokens, given the
        text's tokens before them.
        """
        head = self.head
        target = self.target
        place, unembedding, bias = self._vocabulary or (
            None,
            target.unembedding,
            target.bias,
        )
        greedy = self.greedy_tokens(
            states, rows[:, None] + torch.arange(1, head.positions, device=rows.device)
        )
        known, wanted = (
            (tokens, greedy) if place is None else (place[tokens], place[greedy])
        )
        right = torch.zeros_like(wanted, dtype=torch.bool)
        chunk = max(1, rows_a_chunk(unembedding) // (head.factors * head.rank))
        for part in torch.arange(len(rows), device=rows.device).split(chunk):
            logits = head.logits(
                hidden[part],
                unembedding,
                bias,
                None if context is None else context[part],
            )
            for position, log_q in enumerate(
                mixtures(logits, log_weights[part], known[part])
            ):
                right[part, position] = log_q.argmax(-1) == wanted[part, position]
        return accepted_counts(right)

    def _asked(
        self,
        states: Any,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        place: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens whose probabilities are learnt, the text's first, -1 outside the
        vocabulary: [rows, factors, 1 + k].

        With them the target's probabilities of the k others [rows, factors, k], 0
        outside (None: not distilled).
        """
        lead = self.head.lead
        asked = tokens[:, lead:, None]
        teacher = None
        if self.reads.top_k:
            # Position s is sampled from the state s - 1 rows later.
            at = rows[:, None] + torch.arange(
                lead, self.options.positions, device=rows.device
            )
            asked = torch.cat([asked, states.top_ids[at]], dim=-1)
            teacher = states.top_log_probs[at].exp()
        if place is not None:
            asked = place[asked]
            teacher = None if teacher is None else teacher * (asked[..., 1:] >= 0)
        return asked, teacher

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        rows = counts["rows"]
        n = self.options.positions
        first = 1 + self.head.lead
        share = [counts[f"experts.{a}"] / rows for a in range(self.options.rank)]
        figures = {
            "joint_nats": round(counts["joint"] / rows, 4),
            "joint_nats_a_token": round(counts["joint"] / rows / self.head.factors, 4),
            "first_position": first,
            "conditional_nats_by_position": [
                round(counts[f"position.{s}"] / rows, 4) for s in range(first, n + 1)
            ],
            "share_of_experts": [round(value, 3) for value in share],
        }
        if "next_token" in counts:
            figures["next_token_nats"] = round(counts["next_token"] / rows, 4)
        if "distilled" in counts:
            figures["distilled_nats"] = round(counts["distilled"] / rows, 4)
        if self._vocabulary is not None:
            figures["tokens_in_vocabulary"] = round(
                counts["known"] / rows / self.head.factors, 4
            )
        return figures

    def drafted_tokens(self) -> dict[str, Any]:
        """The fields of a configuration about the draft vocabulary."""
        if self.token_counts is None:  # the data has not been read
            return {"token_counts": False, "draft_vocab_size": None}
        draft_vocab_size = self.options.train_vocab_size or first_guess(
            self.token_counts
        )
        return {"token_counts": True, "draft_vocab_size": draft_vocab_size}

    def config(self) -> HeadsConfig:
        options = self.options
        return CPConfig(
            **self.target.description(),
            **options.model_dump(include=set(Experts.model_fields)),
            dtype=options.stored_dtype,
            **self.drafted_tokens(),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        counts = (
            {} if self.token_counts is None else {"token_counts": self.token_counts}
        )
        return self.head.tensors() | counts


@torch.no_grad()
def ridge_start(head: CPHead, rows: Iterable[Rows]) -> None:
    """Set the matrices that read states so that the result is nearest to the target's
    state at each position.

    Least squares predict h_{t+s-1}, the state that the token of position s is sampled
    from, from h_t. All experts start there, each with its own noise.

    Raises:
        ValueError: if the head is not factorised.
    """
    if head.recurrence is not None:
        return _recurrent_start(head.recurrence, rows)
    if head.transforms is None:
        raise ValueError(
            "full classifiers start as the LM head; a regression gives transforms only"
        )
    d = head.gate.shape[1]
    gram, product = products(
        (states[:, 0].float(), states.float().flatten(1)) for states, _ in rows
    )
    identity = torch.eye(d, device=head.transforms.device)
    for position, transforms in enumerate(head.transforms):
        solved = least_squares(gram, product[:, position * d : (position + 1) * d], d)
        transforms += solved.T.to(transforms) - identity


def _recurrent_start(recurrence: Recurrence, rows: Iterable[Rows]) -> None:
    """Set the linear part of the recurrent state so that the next state is nearest to
    the target's own.
    """
    d = len(recurrence.outer)
    floats = (
        (states[:, 0].float(), states[:, 1].float(), embedded[:, 0].float())
        for states, embedded in rows
    )
    gram, product = products(
        (torch.cat([normed(s), normed(e)], dim=1), after - s) for s, after, e in floats
    )
    solved = least_squares(gram, product, d).split(d)
    for parameter, matrix in zip(
        (recurrence.inner, recurrence.token), solved, strict=True
    ):
        parameter[:d] = matrix.T.to(parameter)


def products(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of x^T x [in, in] and x^T y [in, out], float64 on the CPU, of pairs x [rows,
    in] and y [rows, out].
    """
    gram = product = torch.zeros((), dtype=torch.float64)
    for x, y in pairs:
        gram = gram + (x.T @ x).double().cpu()
        product = product + (x.T @ y).double().cpu()
    return gram, product


def least_squares(gram: torch.Tensor, product: torch.Tensor, d: int) -> torch.Tensor:
    """Ridge coefficients [in, out]: each block of d inputs is penalised by its own
    scale.

    Args:
        gram: x^T x [in, in].
        product: x^T y [in, out].
        d: width of a block.
    """
    of_blocks = gram.diagonal().view(-1, d).mean(dim=1).clamp(min=1e-12)
    penalty = PENALTY * of_blocks.repeat_interleave(d)
    return torch.linalg.solve(gram + penalty.diag(), product)


RECIPE = CPRecipe
