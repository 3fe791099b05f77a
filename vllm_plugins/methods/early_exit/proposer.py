# SPDX-License-Identifier: Apache-2.0
"""Early drafting with deferred KV completion.

One engine step for every decoding request:

    deep pass     last stack over [b, d1..dn] from saved states -> logits, and the deep KV of all n+1 tokens
    verify        vLLM's rejection sampler accepts a prefix and adds the token b'
    shallow loop  first stack on b', read the exit -> d1'; first stack on d1', read -> d2'; ...; keep every state

so each deep weight is read once for n+1 tokens and no shallow work is done twice: n * l/L + 1 full passes a cycle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config import CompilationMode

from vllm_ppd.heads.io import load_early_heads
from vllm_ppd.model_patches.base import CutState, ModelCut
from vllm_ppd.vllm_plugins.drafting.exit_reader import EarlyReader
from vllm_ppd.vllm_plugins.drafting.planner import Plan
from vllm_ppd.vllm_plugins.drafting.proposer import Proposer, Step
from vllm_ppd.vllm_plugins.drafting.saved_states import SavedStates
from vllm_ppd.vllm_plugins.integration.lm_head import TargetLMHead
from vllm_ppd.vllm_plugins.integration.v1.passes import StackPasses
from vllm_ppd.vllm_plugins.methods.early_exit.shallow_loop import ShallowLoop


class EarlyProposer(Proposer):
    """Drafts at exit layers of the target and completes the deferred KV in the next step."""

    cut: ModelCut

    def load_model(self, model: Any) -> None:
        config, vllm_config = self.config, self.vllm_config
        model_config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        device, dtype = self.runner.device, model_config.dtype
        hidden_size = model_config.hf_text_config.hidden_size
        assert config.exit_layer is not None
        compilation = vllm_config.compilation_config
        graphs = compilation.cudagraph_mode.has_piecewise_cudagraphs()
        compiled = compilation.mode != CompilationMode.NONE
        self.cut = ModelCut(model, vllm_config, config.exit_layer, whole=compiled and not graphs)
        heads = None
        if config.model is not None:
            heads = load_early_heads(config.model)[1].requires_grad_(False).to(device=device, dtype=dtype)
        if graphs:
            self.cut.allocate_junction(scheduler.max_num_batched_tokens, hidden_size, dtype, device)
        width = config.num_speculative_tokens + 1
        self.saved = SavedStates(
            scheduler.max_num_seqs, width, hidden_size, dtype, device, self.cut.adapter.has_residual
        )
        self.allocate_probs()
        self.pad_rows(model)
        self.passes = StackPasses(self.runner, self.cut, self.padding)
        self.reader = EarlyReader(self.cut.adapter, TargetLMHead(model), heads)
        self.loop = ShallowLoop(
            config, self.cut, self.passes, self.reader, self.saved, scheduler.max_num_batched_tokens, device
        )

    def draft_all(self, on: bool) -> None:
        self.loop.gamma = 0.0 if on else self.config.gamma

    def begin_step(self, scheduler_output: Any) -> bool:
        """A resumed request's KV blocks are not those of its states, and a new one may bear an old name."""
        changed = super().begin_step(scheduler_output)
        if changed:
            self.saved.clear()
        return changed

    def forward(self, positions: torch.Tensor) -> torch.Tensor | None:
        """The deep pass of a step whose every scheduled token has a saved state.

        Args:
            positions: [tokens] of the step, graph padding included.

        Returns:
            Normed hidden states [tokens, hidden], or None if the step needs the full forward.
        """
        if self.saved.req_ids is None:  # nothing was drafted
            self.counters.add("fallback_steps")
            return None
        runner = self.runner
        num_reqs = runner.input_batch.num_reqs
        query_lens = np.diff(runner.query_start_loc.np[: num_reqs + 1]).astype(np.int64)
        first_positions = runner.input_batch.num_computed_tokens_cpu[:num_reqs].astype(np.int64)
        num_tokens = int(query_lens.sum())
        rows = self.saved.match(
            runner.input_batch.req_ids, first_positions, query_lens, runner.input_ids.np[:num_tokens]
        )
        self.saved.clear()  # a state is good for one step
        if rows is None:
            self.counters.add("fallback_steps")
            return None
        self.counters.add("deferred_steps")
        rows = np.pad(rows, (0, positions.shape[0] - num_tokens))  # the output of padding is not read
        return self.complete(positions, self.saved.load(rows))

    def complete(self, positions: torch.Tensor, state: CutState) -> torch.Tensor:
        """Normed hidden states [tokens, hidden] of tokens from their saved states."""
        return self.cut.stacks[-1](positions, *self.cut.at_junction(state))

    def draft(self, step: Step) -> list[list[int]]:
        self.saved.clear()
        return super().draft(step)

    def draft_plan(self, plan: Plan, step: Step) -> tuple[np.ndarray, np.ndarray]:
        tokens, made = self.loop.run(plan, self.temperature(plan.rows, step.sampling), self.probs)
        self.saved.keep(self.runner.input_batch.req_ids, plan.rows, plan.base_positions, tokens, made + 1)
        self.counters.add("confidence_stops", self.loop.confidence_stops)
        return tokens[:, 1:], made
