# SPDX-License-Identifier: Apache-2.0
"""Training of recurrent heads in IBM's form, as CP heads of rank 1: the target's
distribution after each token.

They start linear: GELU(u) - GELU(-u) = u, so a state of twice the target's width holds
a linear prediction of the target's next state and its negative, and the LM head on it
is the target's own.
"""

from collections.abc import Iterator
from typing import Any

import torch

from vllm_ppd.heads.cp.recipe import CPRecipe, Rows, least_squares, products
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.recurrent.config import RecurrentConfig
from vllm_ppd.heads.recurrent.module import RecurrentHead


class RecurrentRecipe(CPRecipe):
    """Trains embeddings, projections, norms and LM heads; the target's own LM head
    gives the first token.
    """

    head: RecurrentHead
    reach_option = "--num-speculative-tokens"

    def make_head(self) -> RecurrentHead:
        options = self.options
        target = self.target
        inner = options.inner_size or 2 * target.hidden_size
        if options.start == "ridge" and inner != 2 * target.hidden_size:
            raise TrainingError(
                f"--inner-size {inner}: a ridge regression needs a state of twice the "
                f"model's width, {2 * target.hidden_size}; leave it out, or add "
                "--start random"
            )
        config = self._config(token_counts=False)
        generator = torch.Generator().manual_seed(options.seed)
        tensors = {}
        for name, shape in config.shapes().items():
            if len(shape) == 2:
                tensors[name] = torch.empty(shape).normal_(
                    std=inner**-0.5, generator=generator
                )
            else:
                tensors[name] = torch.full(shape, float(name.endswith("weight")))
        return RecurrentHead(config, tensors)

    def use_vocabulary(self, token_ids: torch.Tensor) -> None:
        super().use_vocabulary(token_ids)
        self.head.token_ids = token_ids.to(self.target.device)

    @torch.no_grad()
    def solve(self, rows: Iterator[Rows]) -> None:
        """Set the weights so that a state is [u, -u] with u = A s + B E[x] nearest to
        the target's next state.
        """
        target = self.target
        recurrence = self.head.recurrence()
        size = target.hidden_size
        count = 0
        of_start = 0.0
        of_state = 0.0

        def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            nonlocal count, of_start, of_state
            for states, embedded in rows:
                start = recurrence.start(states[:, 0].float()).output
                count = count + len(states)
                of_start += float(start.square().sum())
                of_state += float(states[:, 0].square().sum())
                yield (
                    torch.cat([start, embedded[:, 0].float()], dim=1),
                    states[:, 1].float(),
                )

        gram, product = products(pairs())
        solution = least_squares(gram, product, size)
        # The scale of u, which the norm scales to 1
        scale = float((solution * (gram @ solution)).sum() / size / count) ** 0.5
        first, token = (
            matrix.to(target.device, torch.float32) for matrix in solution.split(size)
        )
        # Rescaled, for a state of the target's scale
        later = first.T * (of_start / of_state) ** 0.5
        ids = torch.arange(target.vocab_size, device=target.device).split(4096)
        table = (
            torch.cat([target.embed(some).float() @ token for some in ids])
            / recurrence.alpha
        )
        starts = {
            "proj": torch.cat(
                [torch.cat([later, -later]), torch.cat([-later, later])], dim=1
            ),
            "emb": torch.cat([table, -table], dim=1),
            "head": torch.cat([target.unembedding, -target.unembedding], dim=1),
        }
        for name, parameter in self.head.named_weights().items():
            if name == "proj.0.weight":
                parameter.copy_(torch.cat([first.T, -first.T]))
            elif name.startswith("ln"):
                parameter.fill_(scale if name.endswith("weight") else 0.0)
            else:
                parameter.copy_(starts[name.partition(".")[0]])

    def groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """Tables get learning rates in proportion to the size of their numbers."""
        kinds: dict[str, list[torch.Tensor]] = {
            "proj": [],
            "ln": [],
            "emb": [],
            "head": [],
        }
        for name, parameter in self.head.named_weights().items():
            kinds[name.partition(".")[0]].append(parameter)
        size = self.head.settings.inner**-0.5
        of_target = float(
            self.target.unembedding.detach().float().square().mean().sqrt()
        )
        sizes = {
            "emb": size,
            "head": of_target if self.options.start == "ridge" else size,
        }
        return [
            {
                "params": kinds[kind],
                "peak": learning_rate * sizes.get(kind, 1.0),
                "muon": kind == "proj",
            }
            for kind in kinds
        ] + self.base_groups()

    def _config(self, **changes: Any) -> RecurrentConfig:
        options = self.options
        known = self.target.description()
        return RecurrentConfig(
            **known | {"target": known["target"].model_dump()},
            vocab_size=self.target.vocab_size,
            emb_dim=self.target.hidden_size,
            inner_dim=options.inner_size or 2 * self.target.hidden_size,
            n_predict=options.num_speculative_tokens,
            num_speculative_tokens=options.num_speculative_tokens,
            tie_weights=options.tie_weights,
            scale_input=options.scale_input,
            dtype=options.stored_dtype,
            **changes,
        )

    def config(self) -> RecurrentConfig:
        return self._config(**self.drafted_tokens())


RECIPE = RecurrentRecipe
