# SPDX-License-Identifier: Apache-2.0
"""Training of early heads: all exits learn the frozen final layer's output in one pass
(ParaDecode, section 2.1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vllm_ppd.heads.early.config import EarlyConfig, EarlyOptions
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.errors import TrainingError
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
        exits = tuple(sorted(set(options.exit_layers))) or tuple(
            range(1, target.num_layers)
        )
        outside = [layer for layer in exits if not 1 <= layer < target.num_layers]
        if outside:
            raise TrainingError(
                f"--exit-layers {outside[0]} is outside 1..{target.num_layers - 1}: "
                f"this model has {target.num_layers} layers"
            )
        whole = target.unembedding if options.head == "classifier" else None
        self.heads = EarlyHeads(exits, target.hidden_size, options.head, whole).to(
            target.device
        )

    @property
    def reads(self) -> Reads:
        return Reads(exits=self.heads.exit_layers)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Counts]:
        exits = self.heads.exit_layers
        with torch.no_grad():
            states = self.states(batch)
        following, valid = batch.ahead(1)
        if not valid.any():
            return self.nothing(), {}
        rows = self.share_of(valid, self.options.position_share)
        final = states.final[rows]
        hidden = {layer: states.exits[layer][rows] for layer in exits}
        if self.heads.form == "classifier":
            loss, match = self._classifiers(hidden, final, following[rows, 0])
        else:
            students = torch.stack(
                [self.heads(hidden[layer], layer) for layer in exits]
            )
            loss, match = self._transforms(students, final, following[rows, 0])
        counts = {"rows": torch.tensor(len(rows), device=rows.device)}
        counts |= {f"match.{layer}": match[i].sum() for i, layer in enumerate(exits)}
        counts |= {
            f"loss.{layer}": loss[i].detach().sum() for i, layer in enumerate(exits)
        }
        drafts = self.options.num_speculative_tokens
        if not self.training and (ends := batch.ahead(drafts)[1]).any():
            # Each draft is read at the exit, one row later; all exits count alike.
            matches = torch.zeros(
                len(exits), len(valid), dtype=torch.bool, device=rows.device
            )
            matches[:, rows] = match
            starts = ends.nonzero() + torch.arange(drafts, device=rows.device)
            counts |= accepted_counts(matches[:, starts].flatten(0, 1))
        return loss.mean(dim=1).sum(), counts

    def _transforms(
        self, students: torch.Tensor, final: torch.Tensor, following: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [exits, rows], and whether the arg-max agrees (False in training)."""
        unembedding = self.target.unembedding
        bias = self.target.bias
        loss = None
        match = torch.zeros(
            students.shape[:2], dtype=torch.bool, device=students.device
        )
        if self.options.loss == "kl" or not self.training:
            loss, match = kl_to_teacher(
                students, final, unembedding, bias, compare=not self.training
            )
        if self.options.loss == "ce":
            log_q = token_log_probs(
                students.flatten(0, 1),
                following.repeat(len(students)),
                unembedding,
                bias,
            )
            loss = -log_q.view(students.shape[:2])
        assert loss is not None
        return loss, match

    def _classifiers(
        self,
        exits: dict[int, torch.Tensor],
        final: torch.Tensor,
        following: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole classifiers have a gradient, so the backward pass computes the logits
        of each chunk of rows again.
        """
        target = self.target
        cross_entropy = self.options.loss == "ce"
        compare = not (self.training and cross_entropy)
        head = target.unembedding

        def chunk(
            hidden: torch.Tensor, layer: int, rows: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            log_q = functional.log_softmax(self.heads(hidden, layer).float(), dim=-1)
            match = torch.zeros_like(following[rows], dtype=torch.bool)
            if compare:
                with torch.no_grad():
                    logits = functional.linear(
                        final[rows].to(head.dtype), head, target.bias
                    )
                    log_p = functional.log_softmax(logits.float(), dim=-1)
                match = log_q.argmax(-1) == log_p.argmax(-1)
            if cross_entropy:
                return -log_q.gather(1, following[rows, None]).squeeze(1), match
            return (log_p.exp() * (log_p - log_q)).sum(-1), match

        losses = []
        matches = []
        for layer in self.heads.exit_layers:
            chunks: list[Any] = [
                checkpoint(chunk, exits[layer][rows], layer, rows, use_reentrant=False)
                for rows in torch.arange(len(final), device=final.device).split(
                    rows_a_chunk(head)
                )
            ]
            losses.append(torch.cat([loss for loss, _ in chunks]))
            matches.append(torch.cat([match for _, match in chunks]))
        return torch.stack(losses), torch.stack(matches)

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        return {
            f"exit {layer}": {
                f"{self.options.loss}_nats": round(
                    counts[f"loss.{layer}"] / counts["rows"], 4
                ),
                "match": round(counts[f"match.{layer}"] / counts["rows"], 4),
            }
            for layer in self.heads.exit_layers
        }

    def config(self) -> EarlyConfig:
        return EarlyConfig(
            **self.target.description(),
            exit_layers=list(self.heads.exit_layers),
            head=self.options.head,
            num_speculative_tokens=self.options.num_speculative_tokens,
            dtype=self.options.stored_dtype,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.heads.tensors()


RECIPE = EarlyRecipe
