# SPDX-License-Identifier: Apache-2.0
"""vLLM in this process: an engine whose steps are called one by one, and timed from the inside."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from vllm_ppd.benchmarks.harness.contenders import Contender
from vllm_ppd.benchmarks.harness.machine import free_bytes, peak_bytes

COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")


class Engine:
    """A contender's engine; IN_PROCESS (machine.py) must be in the environment before vLLM is imported.

    Attributes:
        counts: COUNTERS as vLLM's scheduler counts them, steps, and drafting: steps that verified drafts.
        facts: size of the KV cache, memory held and left.
    """

    def __init__(self, contender: Contender, arguments: dict[str, Any]) -> None:
        """Start it.

        Args:
            contender: its speculative_config, and arguments of its own.
            arguments: of vLLM's LLM, for all contenders.
        """
        from vllm import LLM

        self.name = contender.name
        arguments = {**arguments, **contender.engine, "speculative_config": contender.speculative_config}
        self.llm = LLM(skip_tokenizer_init=True, **arguments)
        self.counts: Counter[str] = Counter()
        self._count(self.core.scheduler)
        cache = self.llm.llm_engine.vllm_config.cache_config
        capacity = (cache.num_gpu_blocks or 0) * cache.block_size
        self.facts = {"kv_cache_tokens": capacity, "peak_bytes": peak_bytes(), "free_bytes": free_bytes()}
        self._batches = 0
        self._names: list[str] = []

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def worker(self) -> Any:
        """The worker in this process; None where workers are processes."""
        return getattr(getattr(self.core.model_executor, "driver_worker", None), "worker", None)

    def _count(self, scheduler: Any) -> None:
        """vLLM's metrics belong to the newest engine of a process, so the scheduler's calls are counted."""
        original = scheduler.make_spec_decoding_stats

        def counted(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any) -> Any:
            drafts = int(num_draft_tokens > 0)
            self.counts.update(drafts=drafts, draft_tokens=num_draft_tokens, accepted_tokens=num_accepted_tokens)
            return original(
                stats, *args, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **kwargs
            )

        scheduler.make_spec_decoding_stats = counted

    def add(self, name: str, prompt: list[int], tokens: int, temperature: float, top_p: float = 1.0) -> str:
        """Send a request for so many tokens; returns the engine's name for it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=temperature, top_p=top_p if temperature else 1.0, max_tokens=tokens, ignore_eos=True,
            detokenize=False, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        found: str = self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return found

    def step(self) -> list[Any]:
        """One step; outputs are deltas."""
        before = self.counts["drafts"]
        outputs = self.llm.llm_engine.step()
        self.counts.update(steps=1, drafting=int(self.counts["drafts"] > before))
        return outputs

    @property
    def busy(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def begin(self, prompts: list[list[int]], tokens: int, temperature: float) -> None:
        """Drop what is decoded, and decode these prompts until each has a token."""
        self.drop()
        self._batches += 1
        names = [f"{self._batches}-{i}" for i in range(len(prompts))]
        self._names = [self.add(name, ids, tokens, temperature) for name, ids in zip(names, prompts, strict=True)]
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in self.step()}

    def drop(self) -> None:
        if self._names:
            self.llm.llm_engine.abort_request(self._names, internal=True)
        while self.busy:
            self.step()
        self._names = []

    @property
    def whole(self) -> bool:
        """Whether all prompts of begin() still decode."""
        return bool(self.llm.llm_engine.get_num_unfinished_requests() == len(self._names))

    def close(self) -> None:
        """It ends with this process: shutting it down would end the process's groups, which others use."""


def share_weights() -> None:
    """Let vLLM's CPU backend pack equal matrices once for all engines of this process.

    The same product takes up to a fifth longer in one engine than in another, by the memory that each happened to get.
    Where oneDNN has no product of a type (bfloat16 needs AVX-512 or AMX), vLLM catches its error and takes torch's over
    matrices of each engine's own: a line says so.
    """
    from vllm import _custom_ops

    original = _custom_ops.create_onednn_mm
    if hasattr(original, "__wrapped__"):
        return
    packed: dict[tuple[Any, ...], Any] = {}
    unpacked: set[torch.dtype] = set()

    @wraps(original)
    def once(weight: torch.Tensor, *rest: int) -> Any:
        content = hashlib.blake2b(weight.t().contiguous().view(torch.uint8).numpy().data).digest()
        key = (weight.shape, weight.dtype, content, rest)
        if key not in packed:
            try:
                packed[key] = original(weight, *rest)
            except RuntimeError:
                if weight.dtype not in unpacked:
                    unpacked.add(weight.dtype)
                    print(f"oneDNN packs no {weight.dtype} here: each engine reads its own weights, by torch's product")
                raise
        return packed[key]

    _custom_ops.create_onednn_mm = once


class Timers:
    """Seconds by part of a step, added up over the calls that it makes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time every call of owner.name from here on."""
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(self, original: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - started

        return call
