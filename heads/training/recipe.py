# SPDX-License-Identifier: Apache-2.0
"""A recipe defines what the training loop trains, the loss, and what is written at the end."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from tqdm import tqdm

from vllm_ppd.heads.base import MIN_DRAFT_VOCAB, HeadsConfig
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.files import write_json
from vllm_ppd.heads.folder import save_heads
from vllm_ppd.heads.module import columns, first_guess, most_frequent
from vllm_ppd.heads.provenance import PROVENANCE_NAME, write_card
from vllm_ppd.heads.target import stored_name
from vllm_ppd.heads.text import first_problem
from vllm_ppd.heads.training.ridge import TOKENS
from vllm_ppd.heads.training.states import Reads, StatesCache
from vllm_ppd.heads.training.target import Target, TargetStates
from vllm_ppd.heads.training.tokens import Batch, TokenStore
from vllm_ppd.kernels.unembedding_loss import top_log_probs

Counts = dict[str, Tensor]  # sums that can be added over batches and processes


def accepted_counts(right: Tensor) -> Counts:
    """Held-out counts of drafts that are right and follow no wrong one.

    Args:
        right: [rows, drafts] bool, whether each draft of a step is the target's choice,
            and within the text.
    """
    return {
        "accepted": right.long().cumprod(1).sum(0),
        "accepted_of": torch.tensor(len(right), device=right.device),
    }


class Recipe(nn.Module, ABC):
    """A module of trainable parts; the frozen target is not registered in it."""

    def __init__(self, options: Any, target: Target) -> None:
        super().__init__()
        # options: the TrainingOptions of the kind
        self.options = options
        self.target = target
        self.cache: StatesCache | None = (
            None  # set by the loop if states are cached
        )

    def begin(self, store: TokenStore, fresh: bool) -> None:
        """Prepare from the data before a run's first step, or before it continues
        (nothing by default).

        Called after the cache is set and before groups(). If a run continues, its
        checkpoint replaces the parameters afterwards.
        """

    needed = 1  # tokens of a response in a row from which anything is learned

    @property
    def reads(self) -> Reads:
        """What this kind of heads reads of the frozen target, in addition to its final states."""
        return Reads()

    def states(self, batch: Batch) -> TargetStates:
        """The target's states that `reads` names, for every token of the batch: from
        the cache if there is one.

        Cached states are rounded to bfloat16 and returned in the target's dtype;
        `top_log_probs` to float16.
        """
        if self.cache is not None and batch.windows:
            return self.cache.states(batch)
        return self.target.run(batch, *self.reads)

    def share_of(self, known: Tensor) -> Tensor:
        """Rows to learn from: in training the options' share of the known ones [rows]
        bool, drawn anew each time, at least one: [chosen] int64.
        """
        share = self.options.position_share
        rows = known.nonzero().squeeze(1)
        if self.training and share < 1:
            order = torch.randperm(len(rows), device=rows.device)
            rows = rows[order[: max(1, round(share * len(rows)))]]
        return rows

    def greedy_tokens(self, states: TargetStates, at: Tensor) -> Tensor:
        """The target's likeliest token after each of some rows [...]."""
        if states.top_ids is not None:
            return states.top_ids[at, 0]
        target = self.target
        return top_log_probs(
            states.final[at.flatten()], 1, target.unembedding, target.bias
        )[0].view(at.shape)

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, Counts]:
        """The loss to minimize (a mean over the tokens that count), and counts for
        summary().

        Outside of training the counts include accepted_counts. They are empty if no
        token counts.
        """

    def forward(self, batch: Batch) -> tuple[Tensor, Counts]:
        return self.loss(batch)

    def nothing(self) -> Tensor:
        """The loss of a batch in which no token counts: 0, with zero gradients for the
        parameters.
        """
        zero = torch.zeros((), device=self.target.device)
        return sum(
            ((p * 0.0).sum() for p in self.parameters() if p.requires_grad), zero
        )

    def summary(self, counts: dict[str, float]) -> dict[str, Any]:
        """Readable figures from the summed counts, which may lack parts of which nothing
        counts, in addition to accepted drafts (none by default).
        """
        return {}

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """The optimizer's parameter groups; `peak` is each group's highest learning rate."""
        return [
            {
                "params": [p for p in self.parameters() if p.requires_grad],
                "peak": learning_rate,
            }
        ]

    @abstractmethod
    def write(self, out: Path, provenance: dict[str, Any]) -> None:
        """Write the trained modules to a folder, and `provenance.json` last, as a mark
        that it is complete.
        """


class HeadsRecipe(Recipe):
    """A recipe for heads, which may be trained over a part of the vocabulary; the full
    recipe also trains the base model and writes it.

    Raises:
        TrainingError: if that part is larger than the vocabulary.
    """

    # [tokens], the part of the vocabulary that is trained; None: all of it. Not a
    # buffer: each run computes it from the data when it starts.
    token_ids: Tensor | None = None
    token_counts: Tensor | None = (
        None  # [vocabulary] of the data, once it is read
    )

    def __init__(self, options: Any, target: Target) -> None:
        super().__init__(options, target)
        self.full = target.trainable
        self.base = target.model if self.full else None
        size = options.train_vocab_size
        if size and not MIN_DRAFT_VOCAB <= size <= target.vocab_size:
            raise TrainingError(
                f"--train-vocab-size {size} is not from {MIN_DRAFT_VOCAB} to the model's "
                f"{target.vocab_size} tokens; 0 trains all"
            )

    def begin(self, store: TokenStore, fresh: bool) -> None:
        """Choose the draft vocabulary, and start from what some windows show."""
        self.store = store
        self.token_counts = store.token_counts()
        size = self.trained_size
        if size:
            self.use_vocabulary(most_frequent(self.token_counts, size))
        self.start_from(self._windows(store), fresh)

    @property
    def trained_size(self) -> int | None:
        """How many tokens are trained, by default those that cover the answers; 0 or
        None: all.
        """
        options = self.options
        size: int | None = options.train_vocab_size
        is_whole = self.full or not getattr(options, "factorized", True)
        if size is not None or is_whole or self.token_counts is None:
            return size
        return first_guess(self.token_counts)

    def use_vocabulary(self, token_ids: Tensor) -> None:
        """Train over these tokens [tokens] alone."""
        self.token_ids = token_ids.to(self.target.device)

    def start_from(self, batches: Iterator[Batch], fresh: bool = True) -> None:
        """Set the first weights from some windows (nothing by default).

        Args:
            batches: the windows.
            fresh: false if a checkpoint is to replace the weights.
        """

    def _windows(self, store: TokenStore) -> Iterator[Batch]:
        """Windows from all over the data, with TOKENS tokens together."""
        count = store.num_windows()
        number = min(count, math.ceil(TOKENS / store.length))
        for i in tqdm(
            range(number),
            desc="reading states for the start",
            unit=" windows",
            mininterval=1,
            delay=1,
        ):
            yield store.batch("train", [i * count // number]).to(
                self.target.device
            )

    @property
    def vocabulary(
        self,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is trained: the index of each token [vocabulary], -1 if it is not one of
        them; their rows of the LM head [tokens, d]; its bias.
        """
        target = self.target
        ids = self.token_ids
        unembedding = target.unembedding.detach()
        bias = target.bias
        if ids is None:
            every = torch.arange(target.vocab_size, device=target.device)
            return every, unembedding, bias
        bias = None if bias is None else bias[ids]
        return columns(ids, target.vocab_size), unembedding[ids], bias

    def drafted_tokens(self) -> dict[str, Any]:
        """The fields of a configuration about the draft vocabulary."""
        if self.token_counts is None:  # the data has not been read
            return {}
        size = self.trained_size or first_guess(self.token_counts)
        return {"token_counts": True, "draft_vocab_size": size}

    def counts(self) -> dict[str, Tensor]:
        """The tensor of token counts, once the data has been read."""
        if self.token_counts is None:
            return {}
        return {"token_counts": self.token_counts}

    def base_groups(self) -> list[dict[str, Any]]:
        """The optimizer's group of a trained base model, for AdamW, since it has
        embeddings; else empty.
        """
        if self.base is None:
            return []
        return [
            {
                "params": list(self.base.parameters()),
                "peak": self.options.base_learning_rate,
                "muon": False,
            }
        ]

    def checked_config(self) -> Any:
        """The heads' `config.json`.

        Raises:
            TrainingError: on options or a target of which no heads can be written.
        """
        try:
            return self.config()
        except ValidationError as error:
            raise TrainingError(
                "no heads of this model can be written with these options: "
                f"{first_problem(error)}"
            ) from None

    @abstractmethod
    def config(self) -> HeadsConfig:
        """The heads' `config.json`."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The heads' `model.safetensors`."""

    def write(self, out: Path, provenance: dict[str, Any]) -> None:
        if self.full:
            self.target.save(out / "base")
        config = self.config()
        config = config.model_copy(
            update={"verifier": stored_name(config.verifier, out)}
        )
        save_heads(out, config, self.tensors())
        write_json(out / PROVENANCE_NAME, provenance)
        write_card(out, config)
