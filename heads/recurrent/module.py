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
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vllm_ppd.heads.module import Linear, NamedWeights, in_chunks, torch_linear
from vllm_ppd.heads.recurrent.config import RecurrentConfig
from vllm_ppd.heads.training.target import Target, TargetStates

EPSILON = 1e-6
# Token IDs [rows] to embeddings [rows, m]
Read = Callable[[Tensor], Tensor]


class State(NamedTuple):
    """A state between two tokens."""

    output: Tensor  # s [rows, m]; before the first token of the target's width
    cell: Tensor | float = 0.0  # c [rows, m], of an LSTM


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
        tensors: Mapping[str, Tensor],
        linear: Callable[[Tensor], Linear],
        embedding: Callable[[int, Tensor], Read],
        steps: int,
    ) -> None:
        weight = 0.5 ** (0.5 / config.n_predict)
        self.width = config.inner
        self.alpha = math.sqrt((1 - weight**2) * config.inner / 2) / weight
        self.is_lstm = config.form == "sum_lstm"
        self.scale_input = config.scale_input

        def joined(gates: list[str], name: str, dim: int) -> Tensor:
            parts = [tensors[f"{gate}{name}.weight"] for gate in gates]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

        self.projections = [
            linear(joined(config.gates, f"proj.{index}", 0))
            for index in range(min(steps, config.projections))
        ]
        stages = range(min(steps, config.stages))
        self.embeddings = [
            embedding(stage, joined(config.embedding_gates, f"emb.{stage}", 1))
            for stage in stages
        ]
        self.norms = [
            [
                (
                    tensors[f"{norm}.{stage}.weight"],
                    tensors[f"{norm}.{stage}.bias"],
                )
                for norm in config.norms
            ]
            for stage in stages
        ]

    def start(self, hidden: Tensor) -> State:
        """s_0 from the target's final states [rows, d], normed."""
        if self.scale_input:
            hidden = functional.rms_norm(
                hidden, hidden.shape[-1:], eps=EPSILON
            ) / math.sqrt(2)
        return State(hidden)

    def advance(self, position: int, state: State, tokens: Tensor) -> State:
        """The state after head 0, 1, ... has read a token [rows] each."""
        stage = min(position, len(self.embeddings) - 1)
        project = self.projections[min(position, len(self.projections) - 1)]
        norms = self.norms[stage]
        gates = (-1, self.width)
        embedded = self.alpha * self.embeddings[stage](tokens)
        read = project(state.output).unflatten(-1, gates)
        read = read + embedded.unflatten(-1, gates)
        if not self.is_lstm:
            return State(functional.gelu(_norm(read[:, 0], *norms[0])))
        forget, write, output = read[:, :3].sigmoid().unbind(1)
        new = functional.gelu(_norm(read[:, 3], *norms[0]))
        cell = state.cell * forget + new * write
        return State(functional.gelu(_norm(cell, *norms[1])) * output, cell)


def _norm(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.rms_norm(states, states.shape[-1:], weight, EPSILON) + bias


class RecurrentHead(NamedWeights):
    """Recurrent heads with torch's products, for training and calibration, with the
    interface of a CP head of rank 1.

    Args:
        config: of the heads.
        tensors: by the configuration's names.
        drafts: heads in sequence (None: as many as are trained).
    """

    rank = 1
    lead = 1
    layers = ()
    # [tokens], the part of the vocabulary that is trained; None: all of it
    token_ids: Tensor | None = None

    def __init__(
        self,
        config: RecurrentConfig,
        tensors: Mapping[str, Tensor],
        drafts: int | None = None,
    ) -> None:
        super().__init__(config, tensors)
        self.factors = drafts or config.n_predict
        self.positions = self.factors + 1

    def read(self, states: TargetStates) -> Tensor:
        """The target's final states [rows, d]."""
        return states.final

    def context(self, target: Target, tokens: Tensor) -> Tensor:
        """The tokens [rows, positions] themselves, since these heads have their own embeddings."""
        return tokens

    def log_weights(
        self, hidden: Tensor, context: Tensor | None = None
    ) -> Tensor:
        """Log weights of a mixture of one expert: [rows, 1] zeros."""
        return hidden.new_zeros(
            len(hidden),
            1,
            dtype=torch.float32,
        )

    def recurrence(self) -> Recurrence:
        """The recurrence with the current parameters."""
        return Recurrence(
            self.config,
            self.tensors(),
            torch_linear,
            lambda _, table: lambda tokens: functional.embedding(tokens, table),
            self.factors,
        )

    def states(self, hidden: Tensor, context: Tensor) -> Tensor:
        """The state that each head reads out, [rows, factors, m], from the target's
        [rows, d] and tokens.
        """
        recurrence = self.recurrence()
        state = recurrence.start(hidden.to(self.lm_head(0).dtype))
        outputs = []
        for position in range(self.factors):
            state = recurrence.advance(
                position,
                state,
                context[:, position],
            )
            outputs.append(state.output)
        return torch.stack(outputs, dim=1)

    def lm_head(self, position: int) -> Tensor:
        """The matrix of head 0, 1, ..., [vocabulary or trained tokens, m]."""
        stage = min(position, self.config.stages - 1)
        matrix = self.weights[f"head/{stage}/weight"]
        return matrix if self.token_ids is None else matrix[self.token_ids]

    def logits(
        self,
        hidden: Tensor,
        unembedding: Tensor | None,
        bias: Tensor | None,
        context: Tensor,
    ) -> Tensor:
        """[rows, factors, 1, vocabulary]; the target's own LM head is not read."""
        by_position = self.states(hidden, context).unbind(dim=1)
        logits = [
            functional.linear(states, self.lm_head(position))
            for position, states in enumerate(by_position)
        ]
        return torch.stack(logits, dim=1).unsqueeze(2)

    def log_probs(
        self,
        hidden: Tensor,
        tokens: Tensor,
        unembedding: Tensor | None,
        bias: Tensor | None,
        context: Tensor,
        chunk: int = 64,
    ) -> Tensor:
        """log P of k tokens per position [rows, factors, k]: [rows, factors, 1, k];
        logits of a chunk exist at once.
        """
        by_position = []
        for position, states in enumerate(
            self.states(hidden, context).unbind(dim=1)
        ):
            of_tokens = partial(_log_probs, self.lm_head(position))
            by_position.append(
                in_chunks(of_tokens, chunk, states, tokens[:, position])
            )
        return torch.stack(by_position, dim=1).unsqueeze(2)


def _log_probs(lm_head: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
    logits = functional.linear(states, lm_head).float()
    return logits.gather(1, tokens) - logits.logsumexp(1, keepdim=True)
