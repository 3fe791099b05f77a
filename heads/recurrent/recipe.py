# SPDX-License-Identifier: Apache-2.0
"""Training of recurrent heads in IBM's form, as CP heads of rank 1: the target's
distribution after each token.

They start linear: GELU(u) - GELU(-u) = u, so a state of twice the target's width holds
a linear prediction of the target's next state and its negative, and the LM head on it
is the target's own.
"""

from collections.abc import Iterable
from typing import Any

import torch

from vllm_ppd.heads.cp.recipe import CPRecipe, Rows
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.recurrent.config import RecurrentConfig
from vllm_ppd.heads.recurrent.module import RecurrentHead
from vllm_ppd.heads.training.ridge import Ridge


class RecurrentRecipe(CPRecipe):
    """Trains embeddings, projections, norms and LM heads; the target's own LM head
    gives the first token.
    """

    head: RecurrentHead

    def make_head(self) -> RecurrentHead:
        options = self.options
        config = self.checked_config()
        twice = 2 * self.target.hidden_size
        if options.start == "ridge" and config.inner != twice:
            raise TrainingError(
                f"--inner-size {config.inner}: a ridge regression needs a state of "
                f"twice the model's width, {twice}; remove it, or add --start random"
            )
        generator = torch.Generator().manual_seed(options.seed)
        tensors = {}
        for name, shape in config.shapes().items():
            tensors[name] = torch.full(shape, float(name.endswith("weight")))
            if len(shape) == 2:
                tensors[name].normal_(std=config.inner**-0.5, generator=generator)
        return RecurrentHead(config, tensors)

    def use_vocabulary(self, token_ids: torch.Tensor) -> None:
        super().use_vocabulary(token_ids)
        self.head.token_ids = self.token_ids

    @torch.no_grad()
    def solve(self, rows: Iterable[Rows]) -> None:
        """Set the weights so that a state is [u, -u] with u = A s + B E[x] nearest to
        the target's next state.
        """
        target = self.target
        size = target.hidden_size
        recurrence = self.head.recurrence()
        fit = Ridge(size)
        for states, embedded in rows:
            start = recurrence.start(states[:, 0].float()).output
            read = torch.cat([start, embedded[:, 0].float()], dim=1)
            fit.add(read, states[:, 1].float())
        # The norm scales u to 1.
        solution, scale = fit.solve()
        first, token = solution.to(target.device, torch.float32).split(size)
        # Later states have the target's scale.
        rescaled = 0.5**0.5 / self.state_size if self.options.scale_input else 1.0
        later = torch.cat([first.T, -first.T]) * rescaled
        ids = torch.arange(target.vocab_size, device=target.device).split(4096)
        rows_of_table = [target.embed(some).float() @ token for some in ids]
        table = torch.cat(rows_of_table) / recurrence.alpha
        starts = {
            "proj": torch.cat([later, -later], dim=1),
            "emb": torch.cat([table, -table], dim=1),
            "head": torch.cat([target.unembedding, -target.unembedding], dim=1),
        }
        for name, parameter in self.head.tensors().items():
            if name == "proj.0.weight":
                parameter.copy_(torch.cat([first.T, -first.T]))
            elif name.startswith("ln"):
                parameter.fill_(scale if name.endswith("weight") else 0.0)
            else:
                parameter.copy_(starts[name.partition(".")[0]])

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """Tables get learning rates in proportion to the size of their numbers."""
        size = self.head.config.inner**-0.5
        rates = {
            "proj": 1.0,
            "ln": 1.0,
            "emb": size,
            "head": size,
        }
        if self.options.start == "ridge":
            unembedding = self.target.unembedding.detach().float()
            rates["head"] = float(unembedding.square().mean().sqrt())
        weights = self.head.tensors()
        groups = []
        for part, rate in rates.items():
            of_part = [weights[name] for name in weights if name.startswith(part)]
            groups.append(
                {
                    "params": of_part,
                    "peak": learning_rate * rate,
                    "muon": part == "proj",
                }
            )
        return groups + self.base_groups()

    def config(self) -> RecurrentConfig:
        options = self.options
        target = self.target
        return RecurrentConfig(
            **target.description(),
            vocab_size=target.vocab_size,
            emb_dim=target.hidden_size,
            inner_dim=options.inner_size or 2 * target.hidden_size,
            n_predict=options.num_speculative_tokens,
            num_speculative_tokens=options.num_speculative_tokens,
            tie_weights=options.tie_weights,
            scale_input=options.scale_input,
            dtype=options.save_dtype,
            **self.drafted_tokens(),
        )


RECIPE = RecurrentRecipe
