# SPDX-License-Identifier: Apache-2.0
"""DynaMo's token heads and their training: modified CLM (eq. 1), with the base model
frozen or trained, too (A.1).

Each head learns the text's token at its position, the target's own distribution there,
or both.
"""

import copy
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

from vllm_ppd.heads.dynamo.config import MASK, DynaMoConfig, DynaMoOptions
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.mask import LearnedMask
from vllm_ppd.heads.module import first_guess
from vllm_ppd.heads.training.recipe import Counts, HeadsRecipe, accepted_counts
from vllm_ppd.heads.training.states import Reads
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.unembedding_loss import token_log_probs, top_log_probs

# Muon's learning rate, relative to AdamW's: its steps move the few directions that a copied
# layer must change first much less. After 50 steps SmolLM2's heads have 0.33 of 2 drafts
# accepted at 5, 0.28 at 10, 0.19 at 30 and 0.26 with AdamW; at 1 they hardly learn.
MUON_RATE = 5


class DynaMoHeads(nn.Module):
    """Token heads 2..n. Head i reads what the target's last decoder layer reads, and
    predicts the token i ahead.

    A head is a decoder layer of the target's own class; the target's final norm and LM
    head follow it, shared by all heads ("the output embeddings reuse the weights of the
    first head"). Head 1 is the target's own last layer.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        # The names of its tensors are those of the checkpoint.
        self.head = nn.ModuleDict(
            {str(token): layer for token, layer in enumerate(layers, start=2)}
        )

    @property
    def tokens(self) -> int:
        """n: tokens of the joint, head 1 included."""
        return len(self.head) + 1

    def forward(
        self, token: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Head `token`, called as the target's last layer was: its hidden states before
        the final norm.
        """
        output = self.head[str(token)](*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output


def new_layers(
    target: Target, tokens: int, start: str = "copy"
) -> list[nn.Module]:
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

    needed = 2

    def __init__(self, options: DynaMoOptions, target: Target) -> None:
        super().__init__(options, target)
        self.heads = DynaMoHeads(
            new_layers(target, options.tokens, options.start)
        ).to(target.device)
        self.cooccurrence: CoOccurrence | None = None
        mask = {
            name: torch.zeros(shape)
            for name, shape in self.checked_config().shapes().items()
            if name.startswith(MASK)
        }
        # One factor of each product is 0, so the mask begins as none.
        if f"{MASK}before" in mask:
            mask[f"{MASK}before"].normal_(std=target.hidden_size**-0.5)
        self.mask = LearnedMask(mask).to(target.device)

    @property
    def reads(self) -> Reads:
        return Reads(stem=True, top_k=self.options.distilled)

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """Muon's matrices get a higher learning rate than the rest."""
        params = [*self.heads.parameters(), *self.mask.parameters()]
        matrices = [p for p in params if p.dim() > 1]
        others = [p for p in params if p.dim() < 2]
        rate = MUON_RATE if self.options.optimizer == "muon" else 1.0
        return [
            {"params": matrices, "peak": rate * learning_rate},
            {"params": others, "peak": learning_rate},
            *self.base_groups(),
        ]

    def loss(self, batch: Batch) -> tuple[Tensor, Counts]:
        target = self.target
        options = self.options
        with torch.set_grad_enabled(self.full and torch.is_grad_enabled()):
            states = self.states(batch)
        assert states.stem is not None
        args, kwargs = states.stem
        stem = args[0].view_as(args[0])
        if stem.requires_grad:
            # The heads' gradient in the stem is LR_MB / LR_B of the base model's.
            base_rate = options.base_learning_rate
            scale = options.stem_learning_rate / base_rate if base_rate else 0.0
            stem.register_hook(lambda gradient: gradient * scale)
        args = (stem, *args[1:])
        # The final norm and the unembedding belong to the first token: later heads read
        # them without training them.
        norm = {name: p.detach() for name, p in target.norm.named_parameters()}
        index_of, unembedding, bias = self.vocabulary
        total = torch.zeros((), device=target.device)
        counts: Counts = {}
        # Greedy drafts of the later heads by row: [rows, heads]
        shape = (batch.num_tokens, options.tokens - 1)
        drafts = torch.full(shape, -1, device=target.device)
        # Training does not change head 1 of a frozen target and does not read it.
        first = 1 if self.full or not self.training else 2
        for token in range(first, options.tokens + 1):
            following, valid = batch.ahead(token)
            valid = valid[:, -1]
            if not valid.any():
                total = total + self.nothing()
                continue
            rows = valid.nonzero().squeeze(1)
            if token > 1:
                rows = self.share_of(valid)
            wanted = following[rows, -1:]
            if token == 1:
                loss = -target.log_probs(states.final[rows], wanted[:, 0])
                counts["nll.1"] = loss.detach().sum()
            else:
                output = self.heads(token, args, kwargs)
                hidden = functional_call(target.norm, norm, (output,)).flatten(
                    0, 1
                )
                hidden = hidden[rows]
                if options.mask_rank:
                    before = target.embed(following[rows, :-1])
                    hidden = hidden + self.mask(token, before)
                # Token t + i is sampled from the state i - 1 rows later.
                at = rows + token - 1
                if states.top_ids is not None:
                    wanted = torch.cat([wanted, states.top_ids[at]], dim=1)
                wanted = index_of[wanted]
                log_q = token_log_probs(
                    hidden, wanted.clamp(min=0), unembedding, bias, target.cap
                )
                log_q = log_q * (wanted >= 0)
                loss = -log_q[:, 0]
                counts[f"nll.{token}"] = loss.detach().sum()
                if states.top_log_probs is not None:
                    teacher = states.top_log_probs[at].exp()
                    distilled = -(teacher * log_q[:, 1:]).sum(1)
                    counts[f"distilled.{token}"] = distilled.detach().sum()
                    loss = torch.lerp(loss, distilled, options.distillation)
                if not self.training:
                    best, _ = top_log_probs(hidden, 1, unembedding, bias)
                    drafts[rows, token - 2] = best[:, 0]
            if token > 1 or self.full:
                total = total + loss.mean()
            counts[f"rows.{token}"] = torch.tensor(len(rows), device=loss.device)
        valid = batch.ahead(options.tokens)[1][:, 1:]
        starts = valid[:, 0].nonzero()
        if not self.training and len(starts):
            later = torch.arange(1, options.tokens, device=starts.device)
            at = (starts + later).clamp(max=len(valid) - 1)
            greedy = index_of[self.greedy_tokens(states, at)]
            right = drafts[starts[:, 0]] == greedy
            counts |= accepted_counts(right & valid[starts[:, 0]])
        return total, counts

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        figures = {}
        for name, title in (("nll", "nats"), ("distilled", "distilled_nats")):
            for token in range(1, self.options.tokens + 1):
                if f"{name}.{token}" in counts:
                    mean = counts[f"{name}.{token}"] / counts[f"rows.{token}"]
                    figures[f"head {token} {title}"] = round(mean, 4)
        return figures

    def write(self, out: Path, provenance: dict[str, Any]) -> None:
        options = self.options
        if options.mask_entries:
            assert self.token_counts is not None
            documents = tqdm(
                self.store.responses(),
                "counting n-grams",
                len(self.store.starts["train"]),
                unit=" documents",
                mininterval=1,
            )
            self.cooccurrence = CoOccurrence.from_tokens(
                itertools.chain.from_iterable(documents),
                self.token_counts.numpy(),
                options.tokens,
                options.mask_entries,
            )
        super().write(out, provenance)

    def config(self) -> DynaMoConfig:
        options = self.options
        entries = {}
        draft_vocab_size = None
        if self.cooccurrence is not None:
            for order, keys in self.cooccurrence.keys.items():
                entries[order] = len(keys)
            counts = torch.from_numpy(self.cooccurrence.unigram)
            draft_vocab_size = options.train_vocab_size or first_guess(counts)
        layer = self.target.layers[-1].state_dict()
        return DynaMoConfig(
            **self.target.description(),
            tokens=options.tokens,
            layer_tensors={
                name: list(tensor.shape) for name, tensor in layer.items()
            },
            cooccurrence_entries=entries,
            draft_vocab_size=draft_vocab_size,
            mask_rank=options.mask_rank,
            num_speculative_tokens=options.num_speculative_tokens,
            dtype=options.save_dtype,
        )

    def tensors(self) -> dict[str, Tensor]:
        tensors = self.heads.state_dict() | self.mask.tensors()
        if self.cooccurrence is not None:
            tensors |= self.cooccurrence.tensors()
        return tensors


RECIPE = DynaMoRecipe
