# SPDX-License-Identifier: Apache-2.0
"""Training of early heads: all exits learn the frozen final layer's output in one pass
(ParaDecode, section 2.1).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_ppd.heads.early.config import EarlyConfig, EarlyOptions
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.module import in_chunks
from vllm_ppd.heads.training.recipe import Counts, HeadsRecipe, accepted_counts
from vllm_ppd.heads.training.states import Reads
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.unembedding_loss import (
    kl_to_teacher,
    rows_a_chunk,
    token_log_probs,
)


class EarlyRecipe(HeadsRecipe):
    """KL to the final layer, or cross-entropy of the next token (PPD, Table 4), summed
    over the exits.
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

    def loss(self, batch: Batch) -> tuple[Tensor, Counts]:
        exits = self.heads.exit_layers
        with torch.no_grad():
            states = self.states(batch)
        following, valid = batch.ahead(1)
        valid = valid[:, 0]
        if not valid.any():
            return self.nothing(), {}
        rows = self.share_of(valid, self.options.position_share)
        final = states.final[rows]
        read = (
            self._classifiers
            if self.heads.form == "classifier"
            else self._transforms
        )
        hidden = {layer: states.exits[layer][rows] for layer in exits}
        loss, match = read(
            hidden,
            final,
            following[rows, 0],
        )
        counts = {"rows": torch.tensor(len(rows), device=rows.device)}
        for index, layer in enumerate(exits):
            counts[f"match.{layer}"] = match[index].sum()
            counts[f"loss.{layer}"] = loss[index].detach().sum()
        drafts = self.options.num_speculative_tokens
        ends = batch.ahead(drafts)[1]
        if not self.training and ends.any():
            # Each draft is read at the exit, one row later; all exits count alike.
            matches = torch.zeros(
                len(exits), len(valid), dtype=torch.bool, device=rows.device
            )
            matches[:, rows] = match
            first = ends[:, 0].nonzero()
            starts = first + torch.arange(drafts, device=rows.device)
            right = matches[:, starts.clamp(max=len(valid) - 1)]
            counts |= accepted_counts((right & ends[first[:, 0]]).flatten(0, 1))
        return loss.mean(dim=1).sum(), counts

    def _transforms(
        self,
        exits: dict[int, Tensor],
        final: Tensor,
        following: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Losses [exits, rows], and whether the arg-max agrees (False in training)."""
        unembedding = self.target.unembedding
        bias = self.target.bias
        students = torch.stack(
            [self.heads(hidden, layer) for layer, hidden in exits.items()]
        )
        shape = students.shape[:2]
        match = torch.zeros(
            shape,
            dtype=torch.bool,
            device=students.device,
        )
        if self.options.loss == "kl" or not self.training:
            loss, match = kl_to_teacher(
                students,
                final,
                unembedding,
                bias,
                compare=not self.training,
                cap=self.target.cap,
            )
        if self.options.loss == "ce":
            tokens = following.repeat(len(students))
            log_q = token_log_probs(
                students.flatten(0, 1),
                tokens,
                unembedding,
                bias,
                self.target.cap,
            )
            loss = -log_q.view(shape)
        return loss, match

    def _classifiers(
        self,
        exits: dict[int, Tensor],
        final: Tensor,
        following: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As _transforms. Whole classifiers have a gradient, so the backward pass
        computes the logits of each chunk of rows again.
        """
        target = self.target
        head = target.unembedding
        cross_entropy = self.options.loss == "ce"

        def of_chunk(
            layer: int,
            hidden: Tensor,
            final: Tensor,
            following: Tensor,
        ) -> Tensor:
            log_q = self.heads(hidden, layer).float().log_softmax(-1)
            loss = -log_q.gather(1, following[:, None]).squeeze(1)
            if cross_entropy and self.training:
                return torch.stack([loss, torch.zeros_like(loss)], dim=1)
            with torch.no_grad():
                log_p = target.logits(final).log_softmax(-1)
            if not cross_entropy:
                loss = (log_p.exp() * (log_p - log_q)).sum(-1)
            match = log_q.argmax(-1) == log_p.argmax(-1)
            return torch.stack([loss, match.float()], dim=1)

        made = []
        for layer, hidden in exits.items():
            rows = (hidden, final, following)
            made.append(
                in_chunks(partial(of_chunk, layer), rows_a_chunk(head), *rows)
            )
        loss, match = torch.stack(made).unbind(-1)
        return loss, match > 0

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        figures = {}
        for layer in self.heads.exit_layers:
            loss = round(counts[f"loss.{layer}"] / counts["rows"], 4)
            match = round(counts[f"match.{layer}"] / counts["rows"], 4)
            figures[f"exit {layer}"] = {
                f"{self.options.loss}_nats": loss,
                "match": match,
            }
        return figures

    def config(self) -> EarlyConfig:
        exits = self.options.exit_layers or range(1, self.target.num_layers)
        return EarlyConfig(
            **self.target.description(),
            exit_layers=sorted(set(exits)),
            head=self.options.head,
            num_speculative_tokens=self.options.num_speculative_tokens,
            dtype=self.options.save_dtype,
        )

    def tensors(self) -> dict[str, Tensor]:
        return self.heads.tensors()


RECIPE = EarlyRecipe
