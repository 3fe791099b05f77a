# SPDX-License-Identifier: Apache-2.0
"""What every proposer does: vLLM builds it, our runner drives it, one call a phase of the engine step.

begin_step      the scheduler's output is about to be taken in
forward         the target runs, or part of it
after_sampling  tokens were sampled, and are not yet emitted
draft           tokens were emitted: draft those that may follow
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tp_group

from vllm_ppd.kernels.sampling import INVALID, Sampling
from vllm_ppd.vllm_plugins.config.activation import required_config
from vllm_ppd.vllm_plugins.drafting.drafter import Drafter, DraftInputs, Drafts
from vllm_ppd.vllm_plugins.drafting.planner import DraftPlanner, Plan
from vllm_ppd.vllm_plugins.drafting.prompt_lookup import DraftSources
from vllm_ppd.vllm_plugins.engine.cpu.row_padding import NONE, RowPadding, measured
from vllm_ppd.vllm_plugins.engine.invalid_drafts import InvalidDrafts
from vllm_ppd.vllm_plugins.engine.metrics import Counters
from vllm_ppd.vllm_plugins.engine.target import Target, language_model
from vllm_ppd.vllm_plugins.engine.v1.batch import Batch
from vllm_ppd.vllm_plugins.engine.v1.bypass import Bypass
from vllm_ppd.vllm_plugins.engine.v1.step import Step


class Proposer:
    """Drives the drafter of a method: plans, brings its inputs, copies its drafts to the host once."""

    runner: Any
    drafter: Drafter
    padding: RowPadding = NONE  # of steps that verify drafts, and of passes between steps
    decoding = False  # whether the step that runs now takes no prompt in
    probs: torch.Tensor | None = None  # [batch rows, n, vocabulary] q(x) of sampled drafts
    dummy_shallow: Callable[[int, torch.Tensor], Any] | None = None  # DraftInputs.shallow of nobody's requests
    looked_up = False  # whether the latest drafts stood in the requests' own text, and have no q(x)

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.config = required_config(vllm_config, self)
        self.counters = Counters()
        self.invalid = InvalidDrafts(self.counters)
        self.bypass = Bypass()
        self._scheduled: dict[str, int] = {}  # tokens of each request in the step that runs now

    def bind(self, runner: Any) -> None:
        """Take the model runner that will drive this proposer."""
        self.runner = runner
        config, sources = self.config, None
        if config.prompt_lookup_min is not None:
            sources = DraftSources(config.prompt_lookup_min, config.most_lookup_drafts)
        self.batch = Batch(runner)
        self.planner = DraftPlanner(config, self.batch, sources)

    @property
    def drafting_off(self) -> bool:
        """Whether no drafts are meant to follow the step that runs now: what only drafts need may be left out."""
        controller = self.planner.controller
        return self.bypass.active or (controller is not None and controller.off)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's own interface, which lacks the hidden states; only our runner can drive this proposer."""
        raise RuntimeError(f"{self.config.spec.title} needs vllm-ppd's worker; remove --worker-cls")

    def load_model(self, model: Any) -> None:
        """Take the loaded target and allocate everything, before vLLM measures the memory left for its KV cache."""
        self.pad_rows(model)
        self.target = Target(model, self.vllm_config, self.runner.device)
        self.drafter = resolve_name(self.config.spec.drafter)()
        self.drafter.load(self.config, self.target)
        self.allocate_probs()

    @property
    def most_requests(self) -> int:
        """The largest batch that drafts."""
        most: int = self.vllm_config.scheduler_config.max_num_seqs
        return min(most, self.config.disable_by_batch_size or most)

    def allocate_probs(self) -> None:
        """Allocate q(x) if drafts are to be sampled."""
        if self.config.draft_sample_method == "probabilistic" and self.config.verify:
            self.probs = torch.zeros(
                self.most_requests,
                self.config.num_speculative_tokens,
                self.vllm_config.model_config.get_vocab_size(),
                device=self.runner.device,
            )

    def pad_rows(self, model: Any) -> None:
        """Find how many rows passes of few tokens have best."""
        self.padding = measured(language_model(model), self.vllm_config, _agreement())

    def draft_all(self, on: bool) -> None:
        """Make drafts however unsure of them, as while steps are timed."""
        self.drafter.draft_all(on)

    def begin_step(self, scheduler_output: Any) -> bool:
        """Forget what was looked up if a request is new or came back from preemption; returns whether one was."""
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        tokens = len(scheduled) + sum(map(len, drafts.values()))
        self.decoding = scheduler_output.total_num_scheduled_tokens == tokens
        changed = bool(scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        if changed:
            self.planner.forget()
        self.bypass.begin_step(scheduler_output)
        self._scheduled = scheduled
        return changed

    def forward(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Run the target for this step: normed hidden states [tokens, hidden], or None for vLLM's own forward."""
        return None

    def after_sampling(self, logits: torch.Tensor | None, sample: Callable[[], Any]) -> Any:
        """What the step emits: vLLM's own SamplerOutput, which sample() gives, or a method's change of it."""
        return sample()

    def drafting_rows(self) -> np.ndarray | None:
        """Which rows of the batch have what it takes to draft: [batch rows] bool; None: all."""
        return None

    def draft(self, step: Step) -> list[list[int]]:
        """Draft token ids, a list a batch row; empty where a request does not draft."""
        started, planner = time.perf_counter(), self.planner
        drafts: list[list[int]] = [[] for _ in step.sampled_token_ids]
        controller, bypassed = planner.controller, self.bypass.take_steps()
        if controller is not None and bypassed:
            controller.skip(bypassed)
            self.counters.add("suppressed_drafts", controller.suppressed * bypassed)
        plan = planner.plan(step.sampled_token_ids, self.drafting_rows())
        self.looked_up = plan is not None and plan.looked_up is not None
        if plan is not None:
            if plan.looked_up is None:
                tokens, made = self.draft_plan(plan, step)
                made = self._valid(tokens, made)
            else:
                tokens, made = plan.looked_up, plan.max_drafts
            for row, ids, count in zip(plan.rows.tolist(), tokens.tolist(), made.tolist(), strict=True):
                drafts[row] = ids[:count]
        if controller is not None:
            self.counters.add("suppressed_drafts", controller.suppressed)
            self.counters.add("exploration_steps", controller.drafting and controller.gain == np.inf)
            # An unfinished prompt may end in a chunk of one token, which looks like a step of decoding.
            if self.decoding and planner.all_emitted and planner.sources is None:
                self.bypass.begin(controller.steps_off(), self._scheduled.keys())
        self.counters.add("lookup_steps", self.looked_up)
        self.counters.add("drafting_seconds", time.perf_counter() - started)
        return drafts

    def draft_plan(self, plan: Plan, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Draft for the requests of a plan.

        Returns:
            (tokens [requests, at least as many as made], INVALID where what a draft was taken from is not a
            distribution; drafts made [requests]).
        """
        places = np.flatnonzero(plan.max_drafts)
        tokens = np.zeros((len(plan.rows), self.config.num_speculative_tokens), dtype=np.int64)
        made = np.zeros(len(plan.rows), dtype=np.int64)
        found, counts = self.propose_drafts(plan, places, step)
        tokens[places, : found.shape[1]], made[places] = found, counts
        return tokens, made

    def propose_drafts(
        self, plan: Plan, places: np.ndarray, step: Step, shallow: Callable[[int, torch.Tensor], Any] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the drafter for the requests at some places of a plan: (tokens [places, K], drafts made [places])."""
        rows = plan.rows[places]
        inputs = self._inputs(plan, places, step, shallow)
        with torch.inference_mode():
            drafts = self.drafter.propose(inputs)
        counts = inputs.max_drafts
        if drafts.counts is not None:
            counts = torch.minimum(drafts.counts, counts)
        self.keep_probs(rows, drafts)
        found = torch.cat([drafts.token_ids, counts[:, None]], dim=1).cpu().numpy()
        return found[:, :-1], found[:, -1]

    def keep_probs(self, rows: np.ndarray, drafts: Drafts) -> None:
        """Keep q(x) of sampled drafts where vLLM's rejection sampler reads it, by batch row."""
        if self.probs is None or drafts.probs is None:
            return
        index, q = self.index(rows), drafts.probs
        if q.shape[-1] < self.probs.shape[-1]:
            assert self.drafter.vocabulary is not None
            q = self.drafter.vocabulary.spread(q, self.probs[index, : q.shape[1]])
        self.probs[index, : q.shape[1]] = q

    def _inputs(
        self, plan: Plan, places: np.ndarray, step: Step, shallow: Callable[[int, torch.Tensor], Any] | None
    ) -> DraftInputs:
        rows, most = plan.rows[places], plan.max_drafts[places]
        wanted = self.config.spec.request_options
        options = {name: self.index(self.planner.request_options[name][rows]) for name in wanted}
        return DraftInputs(
            newest_ids=self.index(plan.base_tokens[places]),
            hidden=step.sample_hidden_states[self.index(step.last_rows(rows))],
            places=self.index(step.last_tokens(rows, self.batch.starts)),
            max_drafts=self.index(most),
            num_drafts=int(most.max()),
            sampling=self.sampling(rows, step.sampling),
            shallow=shallow,
            options=options,
            context=self.context(rows) if self.drafter.context_tokens else None,
        )

    def context(self, rows: np.ndarray) -> torch.Tensor:
        """The latest tokens of batch rows, newest first, -1 where there are none: [rows, drafter.context_tokens]."""
        batch = self.batch
        places = batch.lengths[rows].astype(np.int64)[:, None] - 1 - np.arange(self.drafter.context_tokens)
        tokens = batch.token_ids[rows[:, None], places.clip(min=0)].astype(np.int64)
        return self.index(np.where(places < 0, -1, tokens))

    def _valid(self, tokens: np.ndarray, made: np.ndarray) -> np.ndarray:
        """Drafts made [requests], none where any of them is INVALID: the rejection sampler must not see its q(x)."""
        invalid = ((tokens == INVALID) & (np.arange(tokens.shape[1]) < made[:, None])).any(axis=1)
        if not invalid.any():
            return made
        self.invalid.add(int(invalid.sum()))
        return np.where(invalid, 0, made)

    def index(self, values: np.ndarray) -> torch.Tensor:
        """An array on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.runner.device, non_blocking=True)

    def sampling(self, rows: np.ndarray, batch: Any) -> Sampling | None:
        """How drafts of some batch rows are sampled; at temperature 0 where they must be greedy, None if all must.

        A seed promises the same output on every run, and drafts are drawn from a generator that requests share. A
        grammar cuts drafts off by what was drawn, after which q(x) is not what they were drawn from.

        Args:
            rows: [requests]
            batch: vLLM's SamplingMetadata.
        """
        if self.probs is None or batch.all_greedy:
            return None
        greedy, index = np.isin(rows, list(batch.generators)) | self.planner.structured[rows], self.index(rows)
        temperature = batch.temperature[index].masked_fill(self.index(greedy), 0.0)
        return Sampling(temperature, *(None if part is None else part[index] for part in (batch.top_k, batch.top_p)))


def _agreement() -> Callable[[np.ndarray], np.ndarray] | None:
    """Makes the first rank's numbers those of all; None where there is one rank."""
    group = get_tp_group()
    if group.world_size == 1:
        return None

    def first_ranks(numbers: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(numbers.copy())
        torch.distributed.broadcast(tensor, src=group.ranks[0], group=group.cpu_group)
        return tensor.numpy()

    return first_ranks
