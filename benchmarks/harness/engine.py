# SPDX-License-Identifier: Apache-2.0
"""vLLM in this process: an engine that decodes a batch step by step and times its own steps."""

import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.benchmarks.harness.machine import free_bytes, peak_bytes
from vllm_ppd.vllm_plugins.draft_length.controller import DraftLengthController
from vllm_ppd.vllm_plugins.draft_length.scheduled import ScheduledDrafts
from vllm_ppd.vllm_plugins.engine.metrics import totals
from vllm_ppd.vllm_plugins.patches.scheduling import follow_step_costs

COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")


@dataclass
class Batch:
    """Requests that decode together, and the timed steps in which all of them do.

    Attributes:
        tokens: of each request, by its id in vLLM.
        counted: counters before the batch, vLLM's and ours.
        steps: seconds of each timed step.
        window_tokens: that the timed steps made.
        phases: seconds of the timed steps in the worker, and in drafting within it.
        finished: whether a request has ended.
    """

    tokens: dict[str, list[int]]
    counted: tuple[dict[str, int], dict[str, float]]
    steps: list[float] = field(default_factory=list)
    window_tokens: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    finished: bool = False


class Engine:
    """A contender's engine; IN_PROCESS (machine.py) must be in the environment before vLLM is imported.

    Attributes:
        facts: size of the KV cache, memory held and left.
    """

    def __init__(self, contender: Contender, arguments: dict[str, Any]) -> None:
        """Start it.

        Args:
            contender: its speculative_config, and engine arguments of it alone.
            arguments: of vLLM's LLM, for all contenders.
        """
        from vllm import LLM

        arguments = {**arguments, **contender.engine, "speculative_config": contender.speculative_config}
        self._engine = LLM(skip_tokenizer_init=True, **arguments).llm_engine
        core = self._core = self._engine.engine_core.engine_core
        self._paused: DraftLengthController | None = None
        self._counts: Counter[str] = Counter()
        self._accepted: Counter[int] = Counter()  # drafts by how many of their tokens were accepted
        self._count_drafts(core.scheduler)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        worker = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
        self._timed = worker is not None  # not if workers are separate processes
        self._time(worker, "execute_model", "worker")
        self._time(worker, "sample_tokens", "worker")
        runner = getattr(worker, "model_runner", None)
        self._time(getattr(runner, "speculator", None), "propose", "draft")  # host time, on a GPU
        self._time(runner, "propose_draft_token_ids", "draft")  # vLLM's own methods on its runner V1
        cache = self._engine.vllm_config.cache_config
        capacity = (cache.num_gpu_blocks or 0) * cache.block_size
        self.facts = {"kv_cache_tokens": capacity, "peak_bytes": peak_bytes(), "free_bytes": free_bytes()}

    def _count_drafts(self, scheduler: Any) -> None:
        """Count drafts in the scheduler's calls, since vLLM's metrics belong to the newest engine of a process."""
        original = scheduler.make_spec_decoding_stats

        def counted(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any) -> Any:
            drafts = int(num_draft_tokens > 0)
            self._counts.update(drafts=drafts, draft_tokens=num_draft_tokens, accepted_tokens=num_accepted_tokens)
            self._accepted[num_accepted_tokens] += drafts
            return original(
                stats, *args, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **kwargs
            )

        scheduler.make_spec_decoding_stats = counted

    def _time(self, owner: Any, name: str, phase: str) -> None:
        """Add the seconds of every call of owner.name, if it exists, to a phase."""
        original = getattr(owner, name, None)
        if original is None:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._seconds[phase] += time.perf_counter() - started

        setattr(owner, name, timed)

    def time_steps(self) -> None:
        """Measure step costs for adaptive drafting again, when no other engine is starting."""
        follow_step_costs(self._core, again=True)

    def adapt(self, adaptive: bool) -> None:
        """Draft adaptively from here on, or always; raises BenchError where drafting was not adaptive."""
        drafts = self._core.scheduler.dynamic_sd_lookup
        if not isinstance(drafts, ScheduledDrafts) or (drafts.controller or self._paused) is None:
            raise BenchError('"adaptive" needs an engine with adaptive drafting; leave it out')
        if adaptive:
            drafts.controller, self._paused = self._paused, None
        else:
            self._paused, drafts.controller = drafts.controller, None

    def turn(self, prompts: list[list[int]], new_tokens: int, temperature: float, top_p: float = 1.0) -> dict[str, Any]:
        """Decode the prompts as one batch, to its end; returns the result of end()."""
        self.begin(prompts, new_tokens, temperature, top_p)
        self.advance()
        return self.end()

    def begin(self, prompts: list[list[int]], new_tokens: int, temperature: float, top_p: float = 1.0) -> None:
        """Send the requests of a batch."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=temperature, top_p=top_p if temperature else 1.0, max_tokens=new_tokens, ignore_eos=True,
            detokenize=False, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        before = {name: self._counts[name] for name in COUNTERS}, dict(totals())
        self._accepted.clear()
        names = [str(index) for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self._batch = Batch({name: [] for name in names}, before)

    def advance(self, steps: int | None = None) -> bool:
        """Decode a number of timed steps, or to the end of the batch.

        Only steps in which all requests decode are timed, not prefill and not the tail in which requests that got
        more drafts accepted have left. With a number of steps the first is not timed: it finds cold caches.

        Returns:
            Whether all requests still decode.
        """
        batch, timed_before = self._batch, len(self._batch.steps)
        cold = steps is not None
        while self._engine.has_unfinished_requests() and (steps is None or not batch.finished):
            if steps is not None and len(batch.steps) - timed_before == steps:
                return True
            decoding = all(batch.tokens.values()) and not batch.finished
            self._seconds.clear()
            started = time.perf_counter()
            outputs = self._engine.step()
            seconds = time.perf_counter() - started
            made = 0
            for output in outputs:
                batch.tokens[output.request_id] += output.outputs[0].token_ids
                made += len(output.outputs[0].token_ids)
                batch.finished |= output.finished
            if decoding and not cold:
                batch.steps.append(seconds)
                batch.window_tokens += made
                batch.phases.update(self._seconds)
            cold = cold and not decoding
        return not batch.finished

    def trace(self, path: str, steps: int) -> None:
        """Write a trace of further, untimed steps of the batch by torch's profiler (a .json.gz for chrome://tracing)."""
        import torch

        activities = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
            for _ in range(steps):
                self._engine.step()
        profile.export_chrome_trace(path)

    def count_calls(self, steps: int, joining: list[int] | None = None) -> dict[str, float]:
        """Calls of CUDA's driver per step in further, untimed steps of the batch (gpu/calls.py).

        Args:
            steps: of the batch.
            joining: prompt of a request that joins the batch, and is dropped afterwards.
        """
        from vllm import SamplingParams

        from vllm_ppd.benchmarks.gpu.calls import of_steps

        if joining is not None:
            params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
            self._engine.add_request("joining", {"prompt_token_ids": joining}, params)
        try:
            return of_steps(self._engine.step, steps)
        finally:
            if joining is not None:
                self._engine.abort_request(["joining"])

    def end(self) -> dict[str, Any]:
        """Abort the requests that still decode, and summarise the batch.

        Returns:
            window_tokens, window_seconds, steps, step_seconds (median), worker_seconds and draft_seconds of the timed
            steps; drafts, draft_tokens and accepted_tokens (as vLLM counts them) and ours (our counters) of the batch;
            accepted_lengths: drafts of which 0, 1, 2, ... tokens were accepted;
            token_ids [requests][tokens]; peak_bytes so far.

        Raises:
            BenchError: if no step was timed.
        """
        batch = self._batch
        self._engine.abort_request(list(batch.tokens))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        if not batch.steps:
            raise BenchError(f"{len(batch.tokens)} requests never all decoded together; give more new tokens")
        counted, ours = batch.counted
        return {
            "window_tokens": batch.window_tokens,
            "window_seconds": sum(batch.steps),
            "steps": len(batch.steps),
            "step_seconds": statistics.median(batch.steps),
            **{f"{phase}_seconds": batch.phases[phase] if self._timed else None for phase in ("worker", "draft")},
            **{name: self._counts[name] - counted[name] for name in COUNTERS},
            "accepted_lengths": [self._accepted[length] for length in range(max(self._accepted, default=-1) + 1)],
            "ours": {name: value - ours[name] for name, value in totals().items() if value != ours[name]},
            "token_ids": list(batch.tokens.values()),
            "peak_bytes": peak_bytes(),
        }
