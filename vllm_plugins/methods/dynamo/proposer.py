# SPDX-License-Identifier: Apache-2.0
"""DynaMo drafting: token heads beside the target's last layer, and as many drafts as their joint is sure of.

    forward  every scheduled token runs through the draft layers too, whose KV stands in the target's own blocks: after
             a prefix-cache hit, a chunk of a prompt or a verified draft it is as complete as the target's. Steps that
             neither compute prompts nor lead to drafts skip these layers (missing_kv.py)
    select   joint over the heads' top-k given the emitted token, masked, thresholded, backed off (Algorithm 1)
    draft    the joint's best n-gram, or a sample of it with its conditionals as q(x)

With verify off n-grams are emitted as they are sampled (proposers/unverified.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_ppd.heads.config import DynaMoConfig
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.joint import JointChoice, select
from vllm_ppd.heads.io import load_tensors
from vllm_ppd.kernels.sampling import INVALID, are_distributions, divisor, is_greedy
from vllm_ppd.model_patches.branched import BranchedModel
from vllm_ppd.model_patches.token_heads import build_layers
from vllm_ppd.vllm_plugins.drafting.draft_vocabulary import DraftVocabulary
from vllm_ppd.vllm_plugins.drafting.planner import Plan
from vllm_ppd.vllm_plugins.drafting.proposer import Proposer, Step
from vllm_ppd.vllm_plugins.integration.lm_head import TargetLMHead
from vllm_ppd.vllm_plugins.integration.v1.missing_kv import MissingKV
from vllm_ppd.vllm_plugins.methods.dynamo.unverified import NGramEmission

JOINT_AT_ONCE = 1 << 22  # entries
CONTEXT = 64  # tokens that the repetition penalty looks back


class DynaMoProposer(Proposer):
    """Drafts with DynaMo token heads; each is one more layer in the target's forward."""

    emission: NGramEmission | None = None
    missing_kv: MissingKV | None = None  # None: no step skips the draft layers

    def load_model(self, model: Any) -> None:
        config, vllm_config = self.config, self.vllm_config
        heads, tensors = load_tensors(str(config.model), DynaMoConfig.kind)
        assert isinstance(heads, DynaMoConfig)
        device, dtype = self.runner.device, vllm_config.model_config.dtype
        max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        hidden_size, count = heads.target.hidden_size, config.num_speculative_tokens
        self.pad_rows(model)
        self.cut = BranchedModel(model, vllm_config)
        weights = [
            {name: tensors[f"head.{token}.{name}"] for name in heads.layer_tensors} for token in range(2, count + 2)
        ]
        layers = build_layers(self.cut.adapter, vllm_config, weights, device)
        self.states = torch.zeros(count, max_tokens, hidden_size, dtype=dtype, device=device)
        self.cut.add_branches(layers, vllm_config, self.states)
        if vllm_config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs():
            self.cut.allocate_junction(max_tokens, hidden_size, dtype, device)
        self.lm_head = TargetLMHead(model)
        counts = CoOccurrence.from_tensors(tensors)
        self.counts = None if counts is None else counts.to(device)
        self.settings = heads.sampling
        self.vocabulary: DraftVocabulary | None = None
        if config.draft_vocab_size is not None:
            frequent = tensors[str(heads.counts_tensor)]
            self.vocabulary = DraftVocabulary(frequent, config.draft_vocab_size, self.lm_head, vllm_config, device)
        if config.verify:
            self.allocate_probs()
            if config.adaptive or config.disable_by_batch_size is not None:
                self.missing_kv = MissingKV(self.runner, config.num_layers)
        else:
            self.emission = NGramEmission(self)

    def forward(self, positions: torch.Tensor) -> torch.Tensor | None:
        if self.missing_kv is not None:
            skip = self._skips_draft_layers(self.missing_kv)
            self.cut.skip_branches = skip
            self.missing_kv.begin_step(skip)
            self.counters.add("skipped_draft_layer_steps", skip)
        return None

    def _skips_draft_layers(self, missing_kv: MissingKV) -> bool:
        """Whether no request can draft after the step that is about to run, and it computes no prompt.

        Prompts, and what a preempted request computes again, always run through the draft layers: their requests may
        draft, and their blocks may be other requests' prefixes.
        """
        batch, most = self.runner.input_batch, self.config.disable_by_batch_size
        rows = batch.num_reqs
        crowded = most is not None and rows > most
        if not (crowded or self.drafting_off or missing_kv.everywhere()):
            return False
        decoded = np.maximum(batch.num_prompt_tokens[:rows], batch.num_tokens_no_spec[:rows] - 1)
        return bool((batch.num_computed_tokens_cpu[:rows] >= decoded).all())

    def begin_step(self, scheduler_output: Any) -> bool:
        if self.missing_kv is not None:
            self.missing_kv.update_requests(scheduler_output)
        return super().begin_step(scheduler_output)

    def drafting_rows(self) -> np.ndarray | None:
        """Those whose tokens all have KV in the draft layers."""
        return None if self.missing_kv is None else self.missing_kv.complete()

    def after_sampling(self, logits: torch.Tensor | None, sample: Any) -> Any:
        return sample() if self.emission is None else self.emission.emit(logits, sample)

    def draft(self, step: Step) -> list[list[int]]:
        return super().draft(step) if self.emission is None else [[] for _ in step.sampled_token_ids]

    def draft_plan(self, plan: Plan, step: Step) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros((len(plan.rows), self.config.num_speculative_tokens), dtype=np.int64)
        made = np.zeros(len(plan.rows), dtype=np.int64)
        drafting = np.flatnonzero(plan.max_drafts)
        for chosen in self.batches(drafting, self.config.num_speculative_tokens):
            rows = plan.rows[chosen]
            places = self.index(step.last_tokens(rows, self.runner.query_start_loc.np))
            temperature = self.temperature(rows, step.sampling)
            choice = self.choose(rows, self.scores(places, temperature), self.index(plan.base_tokens[chosen]))
            found = choice.best() if temperature is None else self._draw(choice, rows, temperature)
            # A joint that is not finite drafts nothing; said of one draft, it is dropped as INVALID.
            order = torch.where(choice.finite, choice.order, 2)
            found[:, 1].masked_fill_(~choice.finite, INVALID)
            tokens[chosen] = found[:, 1:].cpu().numpy()
            made[chosen] = np.minimum(order.cpu().numpy() - 1, plan.max_drafts[chosen])
        return tokens, made

    def batches(self, rows: np.ndarray, free: int) -> list[np.ndarray]:
        """Rows in parts whose joints, of so many free tokens, fit memory."""
        at_once = max(1, JOINT_AT_ONCE // self.settings.k**free)
        return [rows[start : start + at_once] for start in range(0, len(rows), at_once)]

    def logits(self, places: torch.Tensor, vocabulary: DraftVocabulary | None = None) -> torch.Tensor:
        """Of the heads from 2 on, [n - 1, requests, vocabulary] float32: one read of the LM head for all."""
        states = self.states[:, places]
        read = self.lm_head.logits if vocabulary is None else vocabulary.logits
        return read(states.flatten(0, 1)).float().unflatten(0, states.shape[:2])

    def scores(self, places: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
        """Logits at the requests' temperatures of the heads from 2 on: [n - 1, requests, draft vocabulary]."""
        logits = self.logits(places, self.vocabulary)
        return logits if temperature is None else logits / divisor(temperature)

    def choose(self, rows: np.ndarray, scores: Any, first_token: torch.Tensor | None) -> JointChoice:
        """Algorithm 1 for some batch rows, with each one's own threshold; scores as select takes them."""
        server = self.settings.eps_b if self.config.eps_b is None else self.config.eps_b
        own = self.planner.eps_b[rows]
        eps_b = torch.from_numpy(np.where(np.isnan(own), server, own)).to(self.runner.device)
        context = self._context(rows) if self.settings.repetition_penalty > 1 else None
        tokens = None if self.vocabulary is None else self.vocabulary.token_ids
        return select(scores, self.settings, self.counts, first_token, eps_b, context, tokens)

    def _context(self, rows: np.ndarray) -> torch.Tensor:
        """The latest tokens of each row, -1 where there are none: [requests, CONTEXT]."""
        batch = self.runner.input_batch
        places = batch.num_tokens_no_spec[rows].astype(np.int64)[:, None] - 1 - np.arange(CONTEXT)
        tokens = batch.token_ids_cpu[rows[:, None], places.clip(min=0)].astype(np.int64)
        return self.index(np.where(places < 0, -1, tokens))

    def _draw(self, choice: JointChoice, rows: np.ndarray, temperature: torch.Tensor) -> torch.Tensor:
        """A sampled n-gram of each request, or INVALID, its q(x) kept for the rejection sampler: [requests, n]."""
        assert self.probs is not None
        tokens, distributions = choice.draw(is_greedy(temperature))
        index = self.index(rows)
        for offset, (ids, q) in enumerate(zip(choice.token_ids[1:], distributions, strict=True)):
            whole = torch.zeros(len(rows), self.probs.shape[-1], device=q.device)
            self.probs[index, offset] = whole.scatter_(1, ids, q)
            tokens[:, offset + 1].masked_fill_(~are_distributions(q), INVALID)  # also past the order, where -1 stands
        return tokens
