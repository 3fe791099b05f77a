# SPDX-License-Identifier: Apache-2.0
"""Drafting methods on vLLM's runner V1: the runner's mixin, and the proposer between vLLM's batch and the host.

vLLM builds the proposer, and the runner calls it in each phase of an engine step:

    begin_step      the scheduler's output has arrived
    forward         the target runs, or part of it
    after_sampling  tokens were sampled, but not emitted yet
    draft           tokens were emitted: draft the tokens after them
"""

import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ppd.kernels.sampling import Sampling, is_greedy
from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.draft_length.scheduled import BATCH_SIZE, COST, NO_MATCH
from vllm_ppd.vllm_plugins.drafting.planner import DraftPlanner, Plan
from vllm_ppd.vllm_plugins.drafting.prompt_lookup import DraftSources
from vllm_ppd.vllm_plugins.engine.drafter import Drafts
from vllm_ppd.vllm_plugins.engine.host import DraftingHost, buckets
from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.engine.requests import RequestRows, Setting
from vllm_ppd.vllm_plugins.engine.v1.batch import Batch, Step, with_counts
from vllm_ppd.vllm_plugins.engine.v1.verification import Verification
from vllm_ppd.vllm_plugins.engine.weight_updates import UpdatedRunner


class Bypass:
    """Decode steps that bypass drafting, for the same requests; they end early when other requests or prompts come."""

    def __init__(self) -> None:
        self.active = False  # whether the current step is bypassed
        self._left = self._taken = 0
        self._requests: Collection[str] = frozenset()

    def begin(self, steps: int, requests: Collection[str]) -> None:
        """Bypass drafting for a number of steps from the next one on, while they are decode steps of these requests."""
        self._left, self._requests = steps, requests

    def begin_step(self, scheduler_output: Any) -> None:
        """A step begins."""
        scheduled = scheduler_output.num_scheduled_tokens
        others = scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids
        decoding = scheduler_output.total_num_scheduled_tokens == len(scheduled)
        self.active = bool(self._left > 0 and not others and decoding and scheduled.keys() == set(self._requests))
        self._left = self._left - 1 if self.active else 0
        self._taken += self.active

    def take_steps(self) -> int:
        """Steps bypassed since the last call."""
        taken, self._taken = self._taken, 0
        return taken


class Proposer:
    """Plans drafts, gives the host its inputs, and copies its drafts to vLLM's lists once per step."""

    runner: Any
    host: DraftingHost
    drafts_for_all = False  # whether requests that may not draft are also passed to the host
    decoding = False  # whether the current step reads no prompt

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.config = required_config(vllm_config, self)
        self.bypass = Bypass()
        self._scheduled: dict[str, int] = {}  # tokens of each request in the current step
        self._request_rows: np.ndarray | None = None

    def bind(self, runner: Any) -> None:
        """Take the model runner that will drive this proposer."""
        self.runner = runner
        config, requests = self.config, self.vllm_config.scheduler_config.max_num_seqs
        self.batch = Batch(runner)
        self.rows = RequestRows(requests)
        sampled = config.draft_sample_method == "probabilistic" and config.verify
        drafts = config.num_speculative_tokens
        self.host = DraftingHost(config, self.vllm_config, runner.device, requests, drafts, sampled)
        self.q_rows: torch.Tensor | None = None  # [request rows, K, vocabulary] float32: q(x), if drafts are sampled
        sources = None
        if config.prompt_lookup_min is not None:
            sources = DraftSources(config.prompt_lookup_min, config.num_speculative_tokens)
        self.planner = DraftPlanner(config, self.batch, self.host.options, sources)

    @property
    def counters(self) -> Counters:
        """Our counters, for the step's output."""
        return self.host.counters

    @property
    def drafting_off(self) -> bool:
        """Whether no drafts are planned after the current step, so that work for drafts may be left out."""
        controller = self.planner.controller
        return self.bypass.active or (controller is not None and controller.off)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's interface, which lacks the hidden states; only our runner can drive this proposer."""
        raise RuntimeError(f"{self.config.spec.title} needs vllm-ppd's worker; remove --worker-cls")

    def load_model(self, model: Any) -> None:
        """Take the loaded target and allocate everything, before vLLM measures the memory left for its KV cache."""
        self.allocate_q()
        self.host.load(model)

    def refresh(self) -> None:
        """Copy again what was copied of the target's weights, in place, after these have changed."""
        self.host.drafter.refresh()

    def allocate_q(self) -> None:
        """Allocate q(x) if drafts are to be sampled."""
        if self.host.sampled:
            vocab_size = self.vllm_config.model_config.get_vocab_size()
            self.q_rows = torch.zeros(self.host.rows, self.host.num_drafts, vocab_size, device=self.runner.device)

    def warm_up(self) -> None:
        """Allocate drafting's memory and compile its kernels while vLLM measures memory."""
        requests = self.host.rows
        self.host.warm_up(buckets(min(requests, self.config.disable_by_batch_size or requests)))

    def begin_step(self, scheduler_output: Any) -> None:
        """Assign rows to new and resumed requests; a resumed one may have other KV blocks than before."""
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        tokens = len(scheduled) + sum(map(len, drafts.values()))
        self.decoding = scheduler_output.total_num_scheduled_tokens == tokens
        self.bypass.begin_step(scheduler_output)
        self._request_rows = None
        self._scheduled, self._drafts = scheduled, drafts
        came = self.rows.begin_step(scheduler_output)
        if came:
            params = {new.req_id: new.sampling_params for new in scheduler_output.scheduled_new_reqs}
            for name, row in zip(came, self.rows.of(came).tolist(), strict=True):
                self.add_request(row, params[name] if name in params else self.runner.requests[name].sampling_params)
            self.host.options.apply()

    def add_request(self, row: int, params: Any) -> None:
        """A request was given a row: it is new, or resumed after preemption."""
        self.host.options.add(row, params)

    def forward(self, input_ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor | None:
        """Run the target for this step: normed hidden states [tokens, hidden], or None for vLLM's own forward."""
        return None

    def after_sampling(self, logits: torch.Tensor | None, sample: Callable[[], Any]) -> Any:
        """The tokens to emit: vLLM's SamplerOutput from sample(), or a method's change of it."""
        return sample()

    def drafting_rows(self) -> np.ndarray | None:
        """Which rows of the batch can draft: [batch rows] bool; None: all."""
        return np.zeros(self.batch.num_requests, dtype=bool) if self.config.spec.looks_up_alone else None

    def draft(self, step: Step) -> list[list[int]]:
        """Draft token ids, a list per batch row, empty for a request that does not draft."""
        started, planner = time.perf_counter(), self.planner
        drafts: list[list[int]] = [[] for _ in step.sampled_token_ids]
        controller, bypassed = planner.controller, self.bypass.take_steps()
        if controller is not None and bypassed:
            controller.skip(bypassed)
            self.counters.add(COST, bypassed)
            self.counters.add("suppressed_drafts", controller.suppressed * bypassed)
        plan = planner.plan(step.sampled_token_ids, self.request_rows, self.drafting_rows())
        if plan is not None:
            tokens, made = self.draft_plan(plan, step)
            for row, ids, count in zip(plan.rows.tolist(), tokens.tolist(), made.tolist(), strict=True):
                drafts[row] = ids[:count]
        if planner.looked_up is not None and (rows := np.flatnonzero(planner.looked_up.counts)).size:
            for row in rows.tolist():
                drafts[row] = planner.looked_up.tokens[row, : planner.looked_up.counts[row]].tolist()
            self._store_one_hot(rows, planner.looked_up.tokens[rows])
            self.counters.add("lookup_steps")
        if not any(drafts):
            limit = self.config.disable_by_batch_size
            if limit is not None and len(drafts) > limit:
                self.counters.add(BATCH_SIZE)
            elif self.config.spec.looks_up_alone and planner.all_emitted and not planner.any_allowed:
                self.counters.add(NO_MATCH)
            elif controller is not None and controller.off:
                self.counters.add(COST)
        if controller is not None:
            self.counters.add("suppressed_drafts", controller.suppressed)
            self.counters.add("exploration_steps", controller.drafting and controller.gain == np.inf)
            # An unfinished prompt may end in a chunk of one token, which looks like a decode step.
            if self.decoding and planner.all_emitted and planner.sources is None:
                self.bypass.begin(controller.steps_off(), self._scheduled.keys())
        self.counters.add("drafting_seconds", time.perf_counter() - started)
        return drafts

    def draft_plan(self, plan: Plan, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Draft for the requests of a plan: (tokens [requests, K], usable drafts [requests])."""
        tokens = np.zeros((len(plan.rows), self.host.num_drafts), dtype=np.int64)
        made = np.zeros(len(plan.rows), dtype=np.int64)
        places = np.arange(len(plan.rows)) if self.drafts_for_all else np.flatnonzero(plan.max_drafts)
        rows, most = plan.rows[places], plan.max_drafts[places]
        request_rows = self.request_rows[rows]
        with torch.inference_mode():
            self.host.staging.stage_requests(
                rows=self.index(request_rows),
                newest_ids=self.index(plan.base_tokens[places]),
                hidden=step.hidden_states,
                places=self.index(step.last_tokens(rows, self.batch.starts)),
                positions=self.index(plan.base_positions[places]),
            )
            if self.host.staging.context is not None:
                self.host.staging.context[: len(rows)] = self.context(rows)
            drafts = self.host.draft(len(rows), self.host.samples(request_rows), int(most.max()), with_probs=True)
            self._store_q(drafts)
            parts = [drafts.token_ids] if drafts.counts is None else [drafts.token_ids, drafts.counts[:, None]]
            result = torch.cat(parts, dim=1).cpu().numpy()
        ids = result[:, : drafts.token_ids.shape[1]]
        if drafts.counts is not None:
            if self.host.shallow is not None:
                self.counters.add("confidence_stops", int((result[:, -1] < most).sum()))
            most = np.minimum(most, result[:, -1])
        tokens[places, : ids.shape[1]], made[places] = ids, self.host.valid(ids, most)
        return tokens, made

    def _store_q(self, drafts: Drafts) -> None:
        """Store q(x) by request row: one-hot where the best token was taken."""
        if drafts.probs is None or self.q_rows is None:
            return
        staging, (requests, made, entries) = self.host.staging, drafts.probs.shape
        vocabulary = self.host.drafter.vocabulary
        columns = torch.arange(entries, device=drafts.probs.device)
        if vocabulary is not None and entries < self.q_rows.shape[-1]:
            columns = vocabulary.token_ids
        greedy = is_greedy(staging.setting(Setting.DRAFT_TEMPERATURE, requests))[:, None, None]
        one_hot = columns == drafts.token_ids[..., None]
        drafted = torch.arange(made, device=columns.device)[:, None]
        self.q_rows[staging.rows[:requests, None, None], drafted, columns] = torch.where(greedy, one_hot, drafts.probs)

    def _store_one_hot(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Store q(x) of looked-up drafts [rows, K] of batch rows."""
        if self.q_rows is not None:
            requests, ids = self.index(self.request_rows[rows]), self.index(tokens)
            self.q_rows[requests] = 0
            self.q_rows[requests[:, None], torch.arange(ids.shape[1], device=ids.device), ids] = 1

    def draft_sampling(self, plan: Plan) -> Sampling | None:
        """Sampling of the drafts of a plan's requests, at temperature 0 for greedy ones; None if all are greedy."""
        rows = self.request_rows[plan.rows]
        return self.host.options.sampling(rows) if self.host.samples(rows) else None

    def context(self, rows: np.ndarray) -> torch.Tensor:
        """The latest tokens of batch rows, newest first, -1 where there are none: [rows, drafter.context_tokens]."""
        batch = self.batch
        places = batch.lengths[rows].astype(np.int64)[:, None] - 1 - np.arange(self.host.drafter.context_tokens)
        tokens = batch.token_ids[rows[:, None], places.clip(min=0)].astype(np.int64)
        return self.index(np.where(places < 0, -1, tokens))

    @property
    def request_rows(self) -> np.ndarray:
        """The permanent row of each row of the batch in this step."""
        if self._request_rows is None:
            self._request_rows = self.rows.of(self.batch.req_ids)
        return self._request_rows

    def index(self, values: np.ndarray) -> torch.Tensor:
        """An array on the device."""
        return async_tensor_h2d(values, device=self.runner.device)


class DraftingRunnerMixin(UpdatedRunner, Verification):
    """Mixed into GPUModelRunner or CPUModelRunner (V1); hands its hidden states to the proposer.

    Overrides, each of which calls vLLM's unless we draft; see also Verification and UpdatedRunner:

        _update_states             a step begins
        _model_forward             part of the target instead of the full forward
        sample_tokens              our counters go with the step's output
        _sample                    tokens that a method adds to the sampled ones
        propose_draft_token_ids    drafting
        take_draft_token_ids       nothing where nobody drafts
        profile_run                drafting takes memory, too, and compiles its kernels
    """

    drafter: Proposer
    vllm_config: Any
    speculative_config: Any
    requests: dict[str, Any]
    _draft_token_ids: Any  # vLLM's: the result of propose_draft_token_ids

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drafter.bind(self)

    def _update_states(self, scheduler_output: Any) -> Any:
        self.drafter.begin_step(scheduler_output)
        # A bypassed step runs as without speculation, and the drafter is not called after it.
        self.speculative_config = None if self.drafter.bypass.active else self.vllm_config.speculative_config
        return super()._update_states(scheduler_output)

    def _model_forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        hidden = None
        if positions is not None:
            hidden = self.drafter.forward(input_ids, positions)
        if hidden is not None:
            return hidden
        return super()._model_forward(  # type: ignore[misc]
            input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs
        )

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        stock = super()._sample
        return self.drafter.after_sampling(logits, lambda: stock(logits, spec_decode_metadata))

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        super().profile_run(*args, **kwargs)  # type: ignore[misc]
        self.drafter.warm_up()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return with_counts(super().sample_tokens(*args, **kwargs), self.drafter.counters)  # type: ignore[misc]

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]]:
        step = Step(sampled_token_ids, spec_decode_metadata, sampling_metadata, hidden_states)
        drafts = self.drafter.draft(step)
        self._draft_probs = self._draft_prob_req_ids = None
        q_rows = self.drafter.q_rows
        if q_rows is not None and not sampling_metadata.all_greedy:
            self._draft_probs, self._draft_prob_req_ids = q_rows, list(self.drafter.rows.names)
        return drafts

    @torch.inference_mode()
    def refresh_copies(self) -> None:
        self.drafter.refresh()

    def take_draft_token_ids(self) -> Any:
        if isinstance(self._draft_token_ids, list) and not any(self._draft_token_ids):
            return None  # spares the scheduler a look-up per request to record no drafts
        return super().take_draft_token_ids()  # type: ignore[misc]
