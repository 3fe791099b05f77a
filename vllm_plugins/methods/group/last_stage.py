# SPDX-License-Identifier: Apache-2.0
"""The last stage (PPD's main process), which ends every token, samples as vLLM does, and informs the first stage."""

import dataclasses
import time
from typing import Any

import numpy as np
import torch

from vllm_ppd.vllm_plugins.engine.lm_head import TargetLMHead
from vllm_ppd.vllm_plugins.engine.v1.passes import Span
from vllm_ppd.vllm_plugins.methods.group.stage import Stage

NO_TOKEN = -1  # vLLM's mark for no token


class LastStage(Stage):
    """Layers d_bar..d, the final norm, the LM head and the sampler."""

    def load_model(self, model: Any) -> None:
        self.target = model
        self.take(model, (), (self.split, self.config.num_layers))
        self.refresh()

    def refresh(self) -> None:
        """Send the target's norm and LM head, which vLLM loads only here; the first stage reads candidates by them."""
        lm_head = TargetLMHead(self.target)
        place = torch.tensor([lm_head.vocab_size, lm_head.vocab_start, lm_head.num_valid])
        shard, bias = lm_head.shard_of_rank(self.vllm_config, self.runner.device)
        self.channel.send_weights([self.cut.adapter.decoder.norm.weight.data, shard, bias, place])

    @torch.inference_mode()
    def run_micro_steps(self, first: Any) -> Any:
        """Run the micro-steps after a group step's first token.

        Args:
            first: the SamplerOutput of the first micro-step.

        Returns:
            A SamplerOutput with all micro-steps' tokens, [batch rows, micro_steps], NO_TOKEN where a row has no more.
        """
        assert self.allowance is not None
        started, waited = time.perf_counter(), self.channel.seconds_waited
        sampled = first.sampled_token_ids[:, 0].cpu().numpy().astype(np.int64)
        count = len(sampled)
        tokens = np.full((count, self.micro_steps), NO_TOKEN, dtype=np.int64)
        tokens[:, 0] = sampled
        emitted = np.ones(count, dtype=np.int64)
        computed = count  # rows that ran through this stage
        base = self.base_positions()
        self._expect_frame(1, count)
        self.channel.send_tokens(sampled)
        for micro_step in range(1, self.micro_steps):
            rows, state, counted = self.channel.frame(count)
            self.counters.take_in(counted)
            if not len(rows):
                break
            self._expect_frame(micro_step + 1, count)
            computed += len(rows)
            span = Span(rows, base[rows] + emitted[rows], np.ones(len(rows), dtype=np.int64))
            sampled = self.batch.sample(rows, self.target.compute_logits(self.passes.final(span, state)))
            tokens[rows, emitted[rows]] = sampled[rows]
            emitted[rows] += 1
            self.channel.send_tokens(sampled)
        self.counters.add("group_tokens", int(emitted.sum()))
        self.counters.add("group_last_stage_layers", computed * (self.config.num_layers - self.split))
        self.counters.add("group_last_stage_seconds", time.perf_counter() - started)
        self.counters.add("group_last_stage_idle_seconds", self.channel.seconds_waited - waited)
        ids = torch.from_numpy(tokens).to(first.sampled_token_ids)
        return dataclasses.replace(first, sampled_token_ids=ids)

    def _expect_frame(self, micro_step: int, count: int) -> None:
        if micro_step < self.micro_steps:
            self.channel.expect_frame(count)
