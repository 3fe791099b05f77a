# SPDX-License-Identifier: Apache-2.0
"""The last stage (PPD's main process), which ends every token and samples as vLLM does."""

from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from vllm.distributed import get_pp_group

from vllm_ppd.model_patches.base import CutState
from vllm_ppd.vllm_plugins.engine.target import TargetLMHead
from vllm_ppd.vllm_plugins.methods.group.stage import Stage


class LastStage(Stage):
    """Layers d_bar..d, the final norm, the LM head and the sampler."""

    def load_model(self, model: Any) -> None:
        self.target = model
        self.take(model, (), (self.split, self.config.num_layers))
        self.refresh()

    def refresh(self) -> None:
        """Send the target's norm and LM head, which vLLM loads only here; the first
        stage reads candidates by them.
        """
        lm_head = TargetLMHead(self.target, self.vllm_config, self.runner.device)
        place = torch.tensor(
            [lm_head.vocab_size, lm_head.vocab_start, lm_head.num_valid]
        )
        shard, bias = lm_head.rows()
        norm = self.cut.adapter.decoder.norm.weight.data
        get_pp_group().send_tensor_dict(
            {"norm": norm, "shard": shard, "bias": bias, "place": place}
        )

    @torch.inference_mode()
    def run_micro_steps(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """Run the micro-steps after a group step's first tokens.

        Args:
            first: [batch rows] these tokens.

        Returns:
            (tokens of all micro-steps [batch rows, micro_steps] int64, how many of each
            row are tokens [batch rows] int32)
        """
        assert self.step is not None
        count = self.step.size
        every_row = np.arange(count)
        tokens = np.zeros((count, self.micro_steps), dtype=np.int64)
        emitted = np.zeros(count, dtype=np.int32)
        rows = every_row
        sampled = first.cpu().numpy()
        for micro_step in range(1, self.micro_steps + 1):
            tokens[rows, emitted[rows]] = sampled
            emitted[rows] += 1
            self.channel.send_tokens(tokens[every_row, emitted - 1])
            if micro_step == self.micro_steps:
                break
            rows, state, counted = self.channel.frame(count)
            self.counters.values += counted
            if not len(rows):
                break
            positions = self.step.positions[rows] + emitted[rows]
            token_ids = tokens[rows, emitted[rows] - 1]
            sampled = self._sample(rows, positions, token_ids, state)
        ended = int(emitted.sum())
        self.counters.add("group_tokens", ended)
        layers = self.config.num_layers - self.split
        self.counters.add("group_last_stage_layers", ended * layers)
        return self.index(tokens), self.index(emitted)

    def _sample(
        self,
        rows: ndarray,
        positions: ndarray,
        token_ids: ndarray,
        state: CutState,
    ) -> ndarray:
        """The target's next token of some rows, as vLLM's sampler draws it at these
        positions.

        Args:
            rows: [tokens] batch rows.
            positions, token_ids: [tokens] of the tokens that the states are of.
            state: after layer d_bar.
        """
        assert self.step is not None
        request_rows = self.step.request_rows[rows]
        hidden = self.passes.last(request_rows, positions, state)
        index = self.index(request_rows)
        local_positions = torch.zeros_like(index, dtype=torch.int32)
        sampled, _ = self.runner.sampler.sample(
            self.target.compute_logits(hidden),
            index,
            index,
            request_rows,
            self.index(positions),
            self.index(token_ids),
            local_positions,
            (positions + 1).astype(np.int32),
        )
        return sampled.cpu().numpy()
