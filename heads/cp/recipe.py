# SPDX-License-Identifier: Apache-2.0
"""CP heads: joint likelihood of the next n tokens (eq. 9) and balance of the experts
(eq. 10).

The target is frozen, or trained with the head: from its weights or from scratch, with
its own next-token loss. The mixture at each position learns the text's tokens, the
target's own distribution there, or both.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.cp.config import CPConfig, Experts
from vllm_ppd.heads.cp.module import CPHead, initial_tensors, mixtures, normed
from vllm_ppd.heads.training.recipe import Counts, HeadsRecipe, accepted_counts
from vllm_ppd.heads.training.ridge import Ridge
from vllm_ppd.heads.training.states import Reads
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.cp_mixture import balance_loss, conditional_log_probs
from vllm_ppd.kernels.unembedding_loss import rows_a_chunk

# States [rows, positions, d], of which the first is read and the others are predicted,
# and embeddings [rows, positions - 1, d] of the tokens sampled from all states but the
# last.
Rows = tuple[Tensor, Tensor]


class CPRecipe(HeadsRecipe):
    """The training of a CP head; the model's own LM head gives the first token, even if
    the full recipe trains it.

    The CP loss treats LM heads as constants, so the full recipe's learns from the next
    token alone, as the paper's first head does; the other heads' gradients go to the
    states that all share.
    """

    needed = 2

    def __init__(self, options: Any, target: Target) -> None:
        super().__init__(options, target)
        self.state_size = 1.0  # root mean square of the target's states
        self.embedding_rate = 1.0
        self.head = self.make_head().to(target.device)
        self.head.cap = target.cap

    def make_head(self) -> Any:
        """The untrained head: a CPHead, or one with its interface."""
        options = self.options
        target = self.target
        if options.base_start == "random":
            target.forget(options.seed)
        config = self.checked_config()
        tensors = initial_tensors(config, target.unembedding, options.seed)
        return CPHead(config, tensors, options.dropout)

    @property
    def reads(self) -> Reads:
        return Reads(self.head.layers, top_k=self.options.distilled)

    @torch.no_grad()
    def start_from(self, batches: Iterator[Batch], fresh: bool = True) -> None:
        """Compare the scales of states and embeddings, and solve the first transforms,
        on some windows. Learning rates alone need the first with responses.
        """
        rows = self._regressed(batches)
        first = next(rows, None)
        if first is None:
            return
        states, embedded = first
        self.state_size = root_mean_square(states)
        if self.head.lead:
            embedding_size = max(root_mean_square(embedded), 1e-6)
            self.embedding_rate = self.state_size / embedding_size
        if fresh and self.options.start == "ridge":
            self.solve(itertools.chain([first], rows))

    def solve(self, rows: Iterable[Rows]) -> None:
        """Set the matrices that read states so that the result is nearest to the
        target's state at each position.

        Least squares predict h_{t+s-1}, the state that the token of position s is
        sampled from, from h_t. All experts start there, each with its own noise. Of a
        recurrent state, the linear part predicts the next state. Full classifiers stay
        as they are.
        """
        head = self.head
        size = self.target.hidden_size
        transforms = head.weight("transforms")
        if transforms is None and not head.lead:
            return
        fit = Ridge(size)
        for states, embedded in rows:
            states = states.float()
            now = states[:, 0]
            if transforms is not None:
                fit.add(now, states.flatten(1))
            else:
                token = embedded[:, 0].float()
                read = torch.cat([normed(now), normed(token)], dim=1)
                fit.add(read, states[:, 1] - now)
        solution, _ = fit.solve()
        if transforms is not None:
            solved = solution.mT.unflatten(0, (-1, 1, size))
            transforms += (solved - torch.eye(size)).to(transforms)
        else:
            inner, token = solution.mT.split(size, dim=1)
            weights = head.tensors()
            weights["cp.recurrence.inner"][:size] = inner
            weights["cp.recurrence.token"][:size] = token

    def _regressed(self, batches: Iterator[Batch]) -> Iterator[Rows]:
        # A recurrent state predicts the next one alone.
        n = 2 if self.head.lead else self.head.positions
        for batch in batches:
            final = self.states(batch).final
            tokens, valid = batch.ahead(n)
            rows = valid[:, -1].nonzero().squeeze(1)
            if len(rows):  # a window may consist of prompt tokens only
                later = torch.arange(n, device=rows.device)
                states = final[rows[:, None] + later]
                yield states, self.target.embed(tokens[rows, : n - 1])

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """Matrices that read embeddings get a learning rate scaled by how much smaller
        embeddings are than states.
        """
        weights = self.head.tensors()
        tokens = [
            weights.pop(name) for name in ("cp.token_gate",) if name in weights
        ]
        # Full classifiers are too large for Muon: 5 products of V x d x d each in every
        # step.
        large = ("cp.gate", "cp.classifiers")
        dense = [weights.pop(name) for name in large if name in weights]
        tokens_rate = learning_rate * self.embedding_rate
        groups: list[dict[str, Any]] = [
            {"params": [*weights.values()], "peak": learning_rate, "muon": True},
            {"params": dense, "peak": learning_rate, "muon": False},
            {"params": tokens, "peak": tokens_rate, "muon": False},
        ]
        return [group for group in groups if group["params"]] + self.base_groups()

    def loss(self, batch: Batch) -> tuple[Tensor, Counts]:
        options = self.options
        head = self.head
        target = self.target
        tokens, valid = batch.ahead(head.positions)
        is_drafted = valid[:, 1]
        if not is_drafted.any():
            return self.nothing(), {}
        with torch.set_grad_enabled(self.full and torch.is_grad_enabled()):
            states = self.states(batch)
            rows = self.share_of(is_drafted)
            hidden = head.read(states)[rows]
        tokens = tokens[rows]
        valid = valid[rows]
        # The text may end before the last of them: [rows, factors]
        is_learned = valid[:, head.lead :]
        context = head.context(target, tokens[:, :-1])
        index_of, unembedding, bias = self.vocabulary
        # The tokens to learn, the text's first: [rows, factors, 1 + k]
        wanted = tokens[:, head.lead :, None]
        # Position s is sampled from the state s - 1 rows later.
        later = torch.arange(head.positions, device=rows.device)
        places = (rows[:, None] + later).clamp(max=len(states.final) - 1)
        at = places[:, head.lead :]
        if states.top_ids is not None:
            wanted = torch.cat([wanted, states.top_ids[at]], dim=-1)
        wanted = index_of[wanted]
        log_weights = head.log_weights(hidden, context)
        of_experts = head.log_probs(
            hidden,
            wanted.clamp(min=0),
            unembedding,
            bias,
            context,
            self._rows_at_once(unembedding),
        )
        known = (wanted[..., 0] >= 0) & is_learned
        observed = of_experts[..., 0].where(known[..., None], 0.0)
        log_probs = conditional_log_probs(log_weights, of_experts, observed)
        chain = log_probs[..., 0] * known
        loss = -(1 - options.distillation) * chain.sum(1).mean()
        if head.rank > 1:
            loss = loss + options.balance * balance_loss(log_weights)
        counts: Counts = {
            "rows": torch.tensor(len(rows), device=rows.device),
            "joint": -chain.detach().sum(),
        }
        if self.full:
            following, is_text = batch.ahead(1)
            is_text = is_text[:, 0]  # also where no draft follows it
            next_token = -target.log_probs(
                states.final[is_text], following[is_text, 0]
            )
            loss = loss + next_token.mean()
            # As many as there are rows, for the summary
            counts["next_token"] = next_token.detach().mean() * len(rows)
        if states.top_log_probs is not None:
            # Tokens that are not trained have no part in it.
            is_trained = (wanted[..., 1:] >= 0) & is_learned[..., None]
            teacher = states.top_log_probs[at].exp() * is_trained
            distilled = -(teacher * log_probs[..., 1:]).sum(2)
            decay = options.decay ** torch.arange(
                head.factors, device=rows.device
            )
            loss = loss + options.distillation * (distilled.mean(0) * decay).sum()
            counts["distilled"] = distilled.detach().sum()
        if not self.training:
            greedy = self.greedy_tokens(states, places[:, 1:])
            right = self._is_right(greedy, hidden, tokens, context)
            counts |= accepted_counts(right & valid[:, 1:])
        return loss, counts

    def _rows_at_once(self, unembedding: Tensor) -> int:
        return max(
            1, rows_a_chunk(unembedding) // (self.head.factors * self.head.rank)
        )

    def _is_right(
        self,
        greedy: Tensor,
        hidden: Tensor,
        tokens: Tensor,
        context: Tensor | None,
    ) -> Tensor:
        """Whether greedy drafts are the target's greedy tokens [rows, drafts], given the
        text's tokens before them: [rows, drafts].
        """
        head = self.head
        index_of, unembedding, bias = self.vocabulary
        drafts = []
        for part in torch.arange(len(tokens)).split(
            self._rows_at_once(unembedding)
        ):
            read = hidden[part], None if context is None else context[part]
            logits = head.logits(
                read[0],
                unembedding,
                bias,
                read[1],
            )
            weights = head.log_weights(*read)
            log_q = mixtures(logits, weights, index_of[tokens[part]])
            drafts.append(log_q.argmax(-1))
        return torch.cat(drafts) == index_of[greedy]

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        return {
            f"{name}_nats": round(counts[name] / counts["rows"], 4)
            for name in ("joint", "next_token", "distilled")
            if name in counts
        }

    def config(self) -> HeadsConfig:
        options = self.options
        return CPConfig(
            **self.target.description(),
            **options.model_dump(include=set(Experts.model_fields)),
            positions=options.positions,
            dtype=options.save_dtype,
            **self.drafted_tokens(),
        )

    def tensors(self) -> dict[str, Tensor]:
        return self.head.tensors() | self.counts()


def root_mean_square(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())


RECIPE = CPRecipe
