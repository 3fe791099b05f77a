# SPDX-License-Identifier: Apache-2.0
"""DynaMo training: modified CLM (eq. 1) for token heads, with the base model frozen or
trained, too (A.1).

Each head learns the text's token at its position, the target's own distribution there,
or both.
"""

import copy
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from tqdm import tqdm

from vllm_ppd.heads.draft_vocabulary import first_guess
from vllm_ppd.heads.dynamo.config import DynaMoConfig, DynaMoOptions
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.module import DynaMoHeads
from vllm_ppd.heads.training.recipe import Counts, HeadsRecipe, accepted_counts
from vllm_ppd.heads.training.states import Reads
from vllm_ppd.heads.training.target import Target, TargetStates
from vllm_ppd.heads.training.tokens import Batch, TokenStore
from vllm_ppd.kernels.unembedding_loss import token_log_probs, top_log_probs


class _ScaleGradient(torch.autograd.Function):
    """The identity with a scaled gradient: the heads' gradient in the stem is LR_MB /
    LR_B of the base model's.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.scale, None


def new_layers(target: Target, tokens: int, start: str = "copy") -> list[nn.Module]:
    """Decoder layers for heads 2..tokens, of the target's own class, in float32."""
    layers = []
    for _ in range(2, tokens + 1):
        layer = copy.deepcopy(target.layers[-1]).float().requires_grad_(True)
        if start == "random":
            layer.apply(target.model._init_weights)
        layers.append(layer)
    return layers


class DynaMoRecipe(HeadsRecipe):
    """Trains heads alone by default; the full recipe also trains the base model, with
    three rates, and writes it.
    """

    def __init__(self, options: DynaMoOptions, target: Target) -> None:
        super().__init__(options, target)
        self.heads = DynaMoHeads(new_layers(target, options.tokens, options.start)).to(
            target.device
        )
        self.cooccurrence: CoOccurrence | None = None

    reach_option = "--tokens"

    @property
    def reach(self) -> dict[str, int]:
        return {f"head {token}": token for token in range(2, self.options.tokens + 1)}

    @property
    def reads(self) -> Reads:
        return Reads(
            stem=True,
            top_k=self.options.distillation_top_k if self.options.distillation else 0,
        )

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        return [
            {"params": list(self.heads.parameters()), "peak": learning_rate},
            *self.base_groups(),
        ]

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Counts]:
        target = self.target
        options = self.options
        with torch.set_grad_enabled(self.full and torch.is_grad_enabled()):
            states = self.states(batch)
        assert states.stem is not None
        args, kwargs = states.stem
        if self.full:
            scale = (
                options.stem_learning_rate / options.base_learning_rate
                if options.base_learning_rate
                else 0.0
            )
            args = (_ScaleGradient.apply(args[0], scale), *args[1:])
        # The final norm and the unembedding belong to the first token: later heads read
        # them without training them.
        norm = {name: p.detach() for name, p in target.norm.named_parameters()}
        total = torch.zeros((), device=target.device)
        counts: Counts = {}
        drafted: list[torch.Tensor] = []  # greedy drafts of each later head, by row
        # Training does not change head 1 of a frozen target and does not read it.
        for token in range(
            1 if self.full or not self.training else 2, options.tokens + 1
        ):
            following, valid = batch.ahead(token)
            if not valid.any():
                total = total + self.nothing()
                continue
            rows = self.share_of(valid, options.position_share if token > 1 else 1.0)
            following = following[rows, -1]
            if token == 1:
                nll = -target.log_probs(states.final[rows], following)
                loss = nll
            else:
                hidden = functional_call(
                    target.norm, norm, (self.heads(token, args, kwargs),)
                ).flatten(0, 1)
                # Token t + i is sampled from the state i - 1 rows later.
                nll, distilled = self._later(
                    hidden[rows], following, states, rows + token - 1
                )
                loss = (
                    nll
                    if distilled is None
                    else torch.lerp(nll, distilled, options.distillation)
                )
                if not self.training:
                    chosen = top_log_probs(
                        hidden[rows], 1, target.unembedding, target.bias
                    )[0]
                    drafted.append(
                        torch.full_like(valid, -1, dtype=torch.int64).index_copy(
                            0, rows, chosen[:, 0]
                        )
                    )
                if distilled is not None:
                    counts[f"distilled.{token}"] = distilled.detach().sum()
            if token > 1 or self.full:
                total = total + loss.mean()
            counts[f"nll.{token}"] = nll.detach().sum()
            counts[f"rows.{token}"] = torch.tensor(len(rows), device=nll.device)
        starts = batch.ahead(options.tokens)[1].nonzero()
        if drafted and len(starts):
            wanted = self.greedy_tokens(
                states, starts + torch.arange(1, options.tokens, device=starts.device)
            )
            counts |= accepted_counts(
                torch.stack(drafted, dim=1)[starts[:, 0]] == wanted
            )
        return total, counts

    def _later(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        states: TargetStates,
        at: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Losses of one of the heads 2 to n.

        Args:
            hidden: [rows, hidden] of a head, normed.
            tokens: [rows] the text's.
            states: of the target.
            at: [rows] where the target predicts these tokens.

        Returns:
            (-log q of the text's tokens [rows], cross-entropy to the target's likeliest
            tokens [rows], if distilled).
        """
        asked = tokens[:, None]
        if states.top_ids is not None:
            asked = torch.cat([asked, states.top_ids[at]], dim=1)
        log_q = token_log_probs(
            hidden, asked, self.target.unembedding.detach(), self.target.bias
        )
        if states.top_log_probs is None:
            return -log_q[:, 0], None
        return -log_q[:, 0], -(states.top_log_probs[at].exp() * log_q[:, 1:]).sum(1)

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        def mean(name: str, token: int) -> float:
            return round(counts[f"{name}.{token}"] / counts[f"rows.{token}"], 4)

        heads = range(1, self.options.tokens + 1)
        distilled = {
            f"head {i} distilled_nats": mean("distilled", i)
            for i in heads
            if f"distilled.{i}" in counts
        }
        return {
            f"head {i} nats": mean("nll", i) for i in heads if f"nll.{i}" in counts
        } | distilled

    def prepare_output(self, store: TokenStore, folder: Path) -> None:
        options = self.options
        count = len(store.starts["train"])
        if options.mask_entries:
            documents = tqdm(
                store.responses(),
                "counting n-grams",
                count,
                unit=" documents",
                mininterval=1,
            )
            chunks = itertools.chain.from_iterable(documents)
            vocab_size = self.target.vocab_size
            self.cooccurrence = CoOccurrence.from_tokens(
                chunks,
                vocab_size,
                options.tokens,
                options.mask_entries,
                store.token_counts(vocab_size).numpy(),
            )
        super().prepare_output(store, folder)

    def config(self) -> DynaMoConfig:
        entries = {}
        if self.cooccurrence is not None:
            tensors = self.cooccurrence.tensors()
            orders = range(2, self.options.tokens + 1)
            entries = {
                order: len(tensors[f"cooccurrence.{order}.keys"]) for order in orders
            }
        return DynaMoConfig(
            **self.target.description(),
            tokens=self.options.tokens,
            layer_tensors=self.heads.layer_shapes(),
            cooccurrence_entries=entries,
            draft_vocab_size=None
            if self.cooccurrence is None
            else first_guess(self.cooccurrence.unigram),
            num_speculative_tokens=min(
                self.options.num_speculative_tokens, self.options.tokens - 1
            ),
            dtype=self.options.stored_dtype,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        masks = {} if self.cooccurrence is None else self.cooccurrence.tensors()
        return self.heads.tensors() | masks


RECIPE = DynaMoRecipe
