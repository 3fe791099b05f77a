# SPDX-License-Identifier: Apache-2.0
"""Early drafting with deferred KV completion.

One engine step for every decoding request:

    deep pass     last stack over [b, d1..dn] from saved states -> logits, and the deep KV of all n+1 tokens
    verify        vLLM's rejection sampler accepts a prefix and adds the token b'
    shallow loop  first stack on b', read the exit -> d1'; first stack on d1', read -> d2'; ...; keep every state

so each deep weight is read once for n+1 tokens and no shallow work is done twice: n * l/L + 1 full passes a cycle.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from vllm_ppd.heads.checkpoint import load_early_heads
from vllm_ppd.model_patches.base import ModelCut
from vllm_ppd.vllm_plugins.acceptance import AcceptanceWatch
from vllm_ppd.vllm_plugins.activation import active_config
from vllm_ppd.vllm_plugins.metrics import Counters
from vllm_ppd.vllm_plugins.passes import StackPasses
from vllm_ppd.vllm_plugins.plan import DraftPlanner
from vllm_ppd.vllm_plugins.reader import EarlyReader
from vllm_ppd.vllm_plugins.shallow_loop import ShallowLoop
from vllm_ppd.vllm_plugins.states import SavedStates


class EarlyProposer:
    """Drafts at exit layers of the target and completes the deferred KV in the next step.

    vLLM builds it with its configuration; the runner binds itself and then calls load_model once, begin_step and
    forward for every step's model run, and draft after every step's sampling.
    """

    runner: Any
    cut: ModelCut

    def __init__(self, vllm_config: Any) -> None:
        config = active_config(vllm_config)
        if config is None:
            raise RuntimeError("EarlyProposer is started by vllm-ppd's own configuration: use method 'ppd'")
        self.vllm_config = vllm_config
        self.config = config
        self.counters = Counters(vllm_config.parallel_config)
        self.watch = AcceptanceWatch()
        self.probs: torch.Tensor | None = None  # [batch rows, n, vocabulary] q(x) of sampled drafts

    def bind(self, runner: Any) -> None:
        """Take the model runner that will drive this proposer."""
        self.runner = runner
        self.planner = DraftPlanner(self.config, runner)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's own interface, which lacks the hidden states; only our runner can drive this proposer."""
        raise RuntimeError("early drafting needs vllm-ppd's worker; remove --worker-cls")

    def load_model(self, model: Any) -> None:
        """Cut the loaded target and allocate everything, before vLLM measures the memory left for its KV cache."""
        config, vllm_config = self.config, self.vllm_config
        model_config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        device, dtype = self.runner.device, model_config.dtype
        hidden_size = model_config.hf_text_config.hidden_size
        self.cut = ModelCut(model, vllm_config, config.exit_layer)
        heads = None
        if config.model is not None:
            heads = load_early_heads(config.model)[1].requires_grad_(False).to(device=device, dtype=dtype)
        if vllm_config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs():
            self.cut.allocate_junction(scheduler.max_num_batched_tokens, hidden_size, dtype, device)
        width = config.num_speculative_tokens + 1
        self.saved = SavedStates(
            scheduler.max_num_seqs, width, hidden_size, dtype, device, self.cut.adapter.has_residual
        )
        if config.draft_sample_method == "probabilistic":
            self.probs = torch.zeros(scheduler.max_num_seqs, width - 1, model_config.get_vocab_size(), device=device)
        self.passes = StackPasses(self.runner, self.cut)
        self.reader = EarlyReader(model, self.cut.adapter, heads)
        self.loop = ShallowLoop(
            config, self.cut, self.passes, self.reader, self.saved, scheduler.max_num_batched_tokens, device
        )

    def begin_step(self, scheduler_output: Any) -> None:
        """Forget states and what was looked up if a request is new or came back from preemption.

        A resumed request's KV blocks are not those of its states, and a new one may bear an old name.
        """
        if scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self.saved.clear()
            self.planner.forget()

    def forward(self, positions: torch.Tensor) -> torch.Tensor | None:
        """The deep pass of a step whose every scheduled token has a saved state.

        Args:
            positions: [tokens] of the step, graph padding included.

        Returns:
            Normed hidden states [tokens, hidden], or None if the step needs the full forward.
        """
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
        return self.cut.stacks[-1](positions, *self.cut.at_junction(self.saved.load(rows)))

    @torch.inference_mode()
    def draft(
        self, sampled_token_ids: list[list[int]], num_draft_tokens: list[int] | None, sampling: Any
    ) -> list[list[int]]:
        """Draft for every decoding request of the batch.

        Args:
            sampled_token_ids: what the step emitted, a list a request; empty where the prompt is not done.
            num_draft_tokens: how many drafts of each request the step verified.
            sampling: the batch's SamplingMetadata.

        Returns:
            Draft token ids, a list a batch row; empty where a request does not draft.
        """
        started = time.perf_counter()
        self.watch.observe(sampled_token_ids, num_draft_tokens)
        self.saved.clear()
        req_ids = self.runner.input_batch.req_ids
        drafts: list[list[int]] = [[] for _ in req_ids]
        plan = self.planner.plan(sampled_token_ids)
        if plan is not None:
            tokens, made = self.loop.run(plan, sampling, self.probs)
            self.saved.keep(req_ids, plan.rows, plan.base_positions, tokens, made + 1)
            self.counters.add("confidence_stops", self.loop.confidence_stops)
            for row, ids, count in zip(plan.rows.tolist(), tokens[:, 1:].tolist(), made.tolist(), strict=True):
                drafts[row] = ids[:count]
        self.counters.add("drafting_seconds", time.perf_counter() - started)
        return drafts
