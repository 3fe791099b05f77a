# SPDX-License-Identifier: Apache-2.0
"""Training of early heads: all exits learn the frozen final layer's output in one pass
(ParaDecode, section 2.1).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_ppd.heads.early.config import DEPTHS, EarlyConfig, EarlyOptions
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.module import in_chunks
from vllm_ppd.heads.training.recipe import Counts, HeadsRecipe, accepted_counts
from vllm_ppd.heads.training.ridge import Ridge
from vllm_ppd.heads.training.states import Reads
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.unembedding_loss import kl_to_teacher, rows_a_chunk


class EarlyRecipe(HeadsRecipe):
    """Summed over the exits: of transforms KL to the final layer, of classifiers
    cross-entropy of the next token (PPD, Table 4).
    """

    def __init__(self, options: EarlyOptions, target: Target) -> None:
        super().__init__(options, target)
        config = self.checked_config()
        start = torch.eye(target.hidden_size)
        if options.head == "classifier":
            start = target.unembedding.detach().float()
        tensors = {name: start.clone() for name in config.shapes()}
        self.heads = EarlyHeads(config, tensors).to(target.device)

    @property
    def reads(self) -> Reads:
        return Reads(exits=self.heads.exit_layers)

    @torch.no_grad()
    def start_from(self, batches: Iterator[Batch], fresh: bool = True) -> None:
        """Set each transform so that it takes the exit's states nearest to the target's
        final ones, by a ridge regression.
        """
        if not fresh or self.heads.form == "classifier":
            return
        size = self.target.hidden_size
        fits = {layer: Ridge(size) for layer in self.heads.exit_layers}
        for batch in batches:
            states = self.states(batch)
            rows = batch.ahead(1)[1][:, 0]
            final = states.final[rows].float()
            for layer, fit in fits.items():
                fit.add(states.exits[layer][rows].float(), final)
        for layer, fit in fits.items():
            if fit.count:  # windows may consist of prompt tokens only
                self.heads.weight(layer).copy_(fit.solve()[0].T)

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """Whole classifiers are too large for Muon."""
        (group,) = super().groups(learning_rate)
        return [group | {"muon": self.heads.form == "transform"}]

    def loss(self, batch: Batch) -> tuple[Tensor, Counts]:
        exits = self.heads.exit_layers
        with torch.no_grad():
            states = self.states(batch)
        following, valid = batch.ahead(1)
        valid = valid[:, 0]
        if not valid.any():
            return self.nothing(), {}
        rows = self.share_of(valid)
        hidden = torch.stack([states.exits[layer][rows] for layer in exits])
        if self.heads.form == "classifier":
            loss, best = self._classifiers(hidden, following[rows, 0])
        else:
            loss, best = self._transforms(hidden, states.final[rows])
        counts = {"rows": torch.tensor(len(rows), device=rows.device)}
        if not self.training:
            # The target's choice may be a token that is not trained.
            index_of = self.vocabulary[0]
            match = best == index_of[self.greedy_tokens(states, rows)]
            for index, layer in enumerate(exits):
                counts[f"match.{layer}"] = match[index].sum()
                counts[f"loss.{layer}"] = loss[index].detach().sum()
            drafts = self.options.num_speculative_tokens
            # Each draft is read at the exit, one row later; all exits count alike.
            matches = torch.zeros(
                len(exits), len(valid), dtype=torch.bool, device=rows.device
            )
            matches[:, rows] = match
            ends = batch.ahead(drafts)[1]
            first = ends[:, 0].nonzero()
            starts = first + torch.arange(drafts, device=rows.device)
            right = matches[:, starts.clamp(max=len(valid) - 1)]
            counts |= accepted_counts((right & ends[first[:, 0]]).flatten(0, 1))
        return loss.mean(dim=1).sum(), counts

    def _transforms(self, hidden: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Losses [exits, rows], and the likeliest of the trained tokens (0 in training)."""
        _, unembedding, bias = self.vocabulary
        exits = zip(hidden, self.heads.exit_layers, strict=True)
        students = torch.stack([self.heads(*of_exit) for of_exit in exits])
        return kl_to_teacher(
            students,
            final,
            unembedding,
            bias,
            compare=not self.training,
            cap=self.target.cap,
        )

    def _classifiers(
        self, hidden: Tensor, following: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As _transforms. Whole classifiers have a gradient, so the backward pass
        computes the logits of each chunk of rows again.
        """

        def of_chunk(layer: int, hidden: Tensor, following: Tensor) -> Tensor:
            log_q = self.heads(hidden, layer).float().log_softmax(-1)
            loss = -log_q.gather(1, following[:, None])
            return torch.cat([loss, log_q.argmax(-1, keepdim=True)], dim=1)

        size = rows_a_chunk(self.target.unembedding)
        made = [
            in_chunks(partial(of_chunk, layer), size, rows, following)
            for rows, layer in zip(hidden, self.heads.exit_layers, strict=True)
        ]
        loss, best = torch.stack(made).unbind(-1)
        return loss, best.long()

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        figures = {}
        name = "kl_nats" if self.heads.form == "transform" else "ce_nats"
        for layer in self.heads.exit_layers:
            loss = round(counts[f"loss.{layer}"] / counts["rows"], 4)
            match = round(counts[f"match.{layer}"] / counts["rows"], 4)
            figures[f"exit {layer}"] = {name: loss, "match": match}
        return figures

    def config(self) -> EarlyConfig:
        layers = self.target.num_layers
        exits = self.options.exit_layers or [
            max(1, round(layers / part)) for part in DEPTHS
        ]
        return EarlyConfig(
            **self.target.description(),
            **self.drafted_tokens(),
            exit_layers=sorted(set(exits)),
            head=self.options.head,
            num_speculative_tokens=self.options.num_speculative_tokens,
            dtype=self.options.save_dtype,
        )

    def tensors(self) -> dict[str, Tensor]:
        return self.heads.tensors() | self.counts()


RECIPE = EarlyRecipe
