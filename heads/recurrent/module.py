# SPDX-License-Identifier: Apache-2.0
"""The state of recurrent heads from token to token, in the forms that IBM and Snowflake
publish.

Head i reads the previous state (s_0 = h, the target's) and the token x_i, and drafts
x_{i+1}. With n heads of width m, w = 0.5^(0.5 / n), alpha = sqrt((1 - w^2) m / 2) / w,
and norms N(x) = x / sqrt(mean(x^2) + 1e-6) * weight + bias:

    MLP     s_i = GELU(N_i(P_i s_{i-1} + alpha E_i[x_i]))
    LSTM    f, i, o = sigmoid(P s + alpha E[x]) of each gate; c = c f + GELU(N(P_c s +
            alpha E_c[x])) i, from c = 0 s = GELU(N(c)) o

and logits = H_i s_i.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vllm_ppd.heads.recurrent.config import GATES, RecurrentConfig
from vllm_ppd.heads.training.target import Target, TargetStates

EPSILON = 1e-6
# [rows, in], or token IDs [rows], to [rows, out]
Read = Callable[[torch.Tensor], torch.Tensor]


class State(NamedTuple):
    """A state between two tokens."""

    output: torch.Tensor  # s [rows, m]; before the first token of the target's width
    cell: torch.Tensor | float = 0.0  # c [rows, m], of an LSTM


class Recurrence:
    """The steps of a state.

    Args:
        config: of the heads.
        tensors: of the heads, by the configuration's names.
        linear: makes a function y = W x from a matrix W [out, in].
        embedding: makes a lookup of token IDs from a head's number and its table
            [tokens, m].
        steps: the most tokens that are read.
    """

    def __init__(
        self,
        config: RecurrentConfig,
        tensors: Mapping[str, torch.Tensor],
        linear: Callable[[torch.Tensor], Read],
        embedding: Callable[[int, torch.Tensor], Read],
        steps: int,
    ) -> None:
        width = config.inner
        weight = 0.5 ** (0.5 / config.n_predict)
        self.alpha = math.sqrt((1 - weight**2) * width / 2) / weight
        self.is_lstm = config.form == "sum_lstm"
        self.scale_input = config.scale_input
        gates = [f"{gate}_" for gate in GATES] if self.is_lstm else [""]
        stages = range(min(steps, config.stages))
        tables = gates[: 1 if config.tie_lstm_embs else None]

        def joined(names: list[str], dim: int) -> torch.Tensor:
            parts = [tensors[name] for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

        self.projections = [
            linear(joined([f"{gate}proj.{index}.weight" for gate in gates], 0))
            for index in range(min(steps, config.projections))
        ]
        self.embeddings = [
            embedding(
                stage, joined([f"{gate}emb.{stage}.weight" for gate in tables], 1)
            )
            for stage in stages
        ]
        norms = ("cell_ln", "state_ln") if self.is_lstm else ("ln",)
        self.norms = [
            [
                (tensors[f"{norm}.{stage}.weight"], tensors[f"{norm}.{stage}.bias"])
                for norm in norms
            ]
            for stage in stages
        ]

    def start(self, hidden: torch.Tensor) -> State:
        """s_0 from the target's final states [rows, d], normed."""
        if self.scale_input:
            hidden = functional.rms_norm(
                hidden, hidden.shape[-1:], eps=EPSILON
            ) / math.sqrt(2)
        return State(hidden)

    def advance(self, position: int, state: State, tokens: torch.Tensor) -> State:
        """The state after head 0, 1, ... has read a token [rows] each."""
        stage = min(position, len(self.embeddings) - 1)
        projected = self.projections[min(position, len(self.projections) - 1)](
            state.output
        )
        embedded = self.embeddings[stage](tokens)
        norms = self.norms[stage]
        if not self.is_lstm:
            return State(
                functional.gelu(_norm(projected + self.alpha * embedded, *norms[0]))
            )
        width = len(norms[0][0])
        gates = projected.unflatten(-1, (-1, width)) + self.alpha * embedded.unflatten(
            -1, (-1, width)
        )
        forget, write, output = gates[..., :3, :].sigmoid().unbind(-2)
        cell = (
            state.cell * forget
            + functional.gelu(_norm(gates[..., 3, :], *norms[0])) * write
        )
        return State(functional.gelu(_norm(cell, *norms[1])) * output, cell)


def _norm(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return functional.rms_norm(states, states.shape[-1:], weight, EPSILON) + bias


class RecurrentHead(nn.Module):
    """Recurrent heads with torch's products, for training and calibration, with the
    interface of a CP head of rank 1.

    Args:
        config: of the heads.
        tensors: by the configuration's names; counts are left out.
    """

    rank = 1
    lead = 1
    layers = ()

    def __init__(
        self, config: RecurrentConfig, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.settings = config
        self.factors = config.n_predict
        self.positions = config.n_predict + 1
        weights = {
            name: tensor
            for name, tensor in tensors.items()
            if not config.is_count(name)
        }
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(weights[name]) for name in weights}
        )
        # The draft vocabulary in training; None: all tokens
        self.token_ids: torch.Tensor | None = None

    def named_weights(self) -> dict[str, nn.Parameter]:
        """The parameters by the configuration's names."""
        return {
            name.replace("/", "."): parameter
            for name, parameter in self.weights.items()
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint, by name."""
        return {
            name: parameter.detach() for name, parameter in self.named_weights().items()
        }

    def read(self, states: TargetStates) -> torch.Tensor:
        """The target's final states [rows, d]."""
        return states.final

    def context(self, target: Target, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens [rows, positions] themselves, since these heads have their own embeddings."""
        return tokens

    def log_weights(
        self, hidden: torch.Tensor, context: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Log weights of a mixture of one expert: [rows, 1] zeros."""
        return hidden.new_zeros(len(hidden), 1, dtype=torch.float32)

    def recurrence(self) -> Recurrence:
        """The recurrence with the current parameters."""
        return Recurrence(
            self.settings,
            self.named_weights(),
            lambda matrix: lambda x: functional.linear(x, matrix),
            lambda _, table: lambda tokens: functional.embedding(tokens, table),
            self.factors,
        )

    def states(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """The state that each head reads out, [rows, factors, m], from the target's
        [rows, d] and tokens.
        """
        recurrence = self.recurrence()
        dtype = self.named_weights()["head.0.weight"].dtype
        state = recurrence.start(hidden.to(dtype))
        outputs = []
        for position in range(self.factors):
            state = recurrence.advance(position, state, context[:, position])
            outputs.append(state.output)
        return torch.stack(outputs, dim=1)

    def lm_head(self, position: int) -> torch.Tensor:
        """The matrix of head 0, 1, ..., [vocabulary or trained tokens, m]."""
        matrix = self.named_weights()[
            f"head.{min(position, self.settings.stages - 1)}.weight"
        ]
        return matrix if self.token_ids is None else matrix[self.token_ids]

    def logits(
        self,
        hidden: torch.Tensor,
        unembedding: torch.Tensor | None,
        bias: torch.Tensor | None,
        context: torch.Tensor,
    ) -> torch.Tensor:
        """[rows, factors, 1, vocabulary]; the target's own LM head is not read."""
        states = self.states(hidden, context).unbind(dim=1)
        return torch.stack(
            [functional.linear(s, self.lm_head(i)) for i, s in enumerate(states)], dim=1
        ).unsqueeze(2)

    def log_probs(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        unembedding: torch.Tensor | None,
        bias: torch.Tensor | None,
        context: torch.Tensor,
        chunk: int = 64,
    ) -> torch.Tensor:
        """log P of k tokens per position [rows, factors, k]: [rows, factors, 1, k];
        logits of a chunk exist at once.
        """

        def of_chunk(
            states: torch.Tensor, index: torch.Tensor, matrix: torch.Tensor
        ) -> torch.Tensor:
            logits = functional.linear(states, matrix).float()
            return logits.gather(1, index) - logits.logsumexp(1, keepdim=True)

        by_position = []
        for position, states in enumerate(self.states(hidden, context).unbind(dim=1)):
            matrix = self.lm_head(position)
            parts = zip(
                states.split(chunk), tokens[:, position].split(chunk), strict=True
            )
            by_position.append(
                torch.cat(
                    [
                        checkpoint(of_chunk, *part, matrix, use_reentrant=False)
                        for part in parts
                    ]
                )
            )
        return torch.stack(by_position, dim=1).unsqueeze(2)
