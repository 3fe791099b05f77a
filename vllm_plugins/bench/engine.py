# SPDX-License-Identifier: Apache-2.0
"""One contender: a vLLM engine in a process of its own, which decodes when it is its turn.

The engine core runs inside that process, so that its steps can be timed one by one; between turns it waits on a pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_ppd.vllm_plugins.bench import BenchError
from vllm_ppd.vllm_plugins.bench.contenders import Contender
from vllm_ppd.vllm_plugins.bench.huge_pages import huge_pages
from vllm_ppd.vllm_plugins.bench.timers import Timers
from vllm_ppd.vllm_plugins.metrics import totals

COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}


class Engine:
    """The parent's side of a contender."""

    def __init__(self, contender: Contender, arguments: dict[str, Any], log: Path) -> None:
        """Start it and wait until it has loaded and compiled.

        Args:
            contender: its speculative_config.
            arguments: of vLLM's LLM.
            log: where its output goes.

        Raises:
            BenchError: if it does not start; with the reason's last line.
        """
        self.name, self.log = contender.name, log
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = {**arguments, **contender.engine, "speculative_config": contender.speculative_config}
        self.ranks = arguments.get("pipeline_parallel_size", 1) * arguments.get("tensor_parallel_size", 1)
        environment = ENVIRONMENT | huge_pages()
        kept = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            self.process = context.Process(target=_serve, args=(theirs, arguments, str(log)), name=contender.name)
            self.process.start()
        finally:
            for name, value in kept.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        theirs.close()
        self.facts: dict[str, Any] = self._receive()

    def turn(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> dict[str, Any]:
        """Decode the prompts as one batch; as decode_batch.

        Raises:
            BenchError: if the engine fails.
        """
        self.pipe.send((prompts, new_tokens, temperature))
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            answer = self.pipe.recv()
        except EOFError:
            self.process.join()
            said = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
            last = next((line for line in reversed(said) if line.strip()), "nothing")
            code = self.process.exitcode
            raise BenchError(f"{self.name}: the engine ended with code {code}; its last line: {last}") from None
        if isinstance(answer, str):
            raise BenchError(f"{self.name}: {answer}")
        return answer

    def close(self) -> None:
        """End the process, whatever it does."""
        self.pipe.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Connection, arguments: dict[str, Any], log: str) -> None:
    """The child's side: load, then a turn for each message, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        from vllm import LLM
        from vllm.platforms import current_platform

        from vllm_ppd.vllm_plugins.cpu_mends import mend_workers_to_come

        if current_platform.is_cpu():
            # vLLM's own methods sample wrongly on this backend; compared is what they are without that mistake.
            mend_workers_to_come()
        llm = LLM(disable_log_stats=False, skip_tokenizer_init=True, **arguments)
        split = _Split(llm)
        cache = llm.llm_engine.vllm_config.cache_config
        capacity = (cache.num_gpu_blocks or 0) * cache.block_size
        pipe.send({"kv_cache_tokens": capacity, "peak_bytes": peak_bytes(), "free_bytes": free_bytes()})
        while True:
            prompts, new_tokens, temperature = pipe.recv()
            pipe.send(decode_batch(llm, split, prompts, new_tokens, temperature))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        import traceback

        traceback.print_exc()
        pipe.send(" ".join(str(error).split())[:400] or type(error).__name__)


class _Split(Timers):
    """Seconds of the host in the worker and in drafting since the engine started."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        worker = getattr(getattr(getattr(core, "model_executor", None), "driver_worker", None), "worker", None)
        self.known = worker is not None  # not where workers are processes of their own
        if worker is None:
            return
        for name in ("execute_model", "sample_tokens"):
            self.wrap(worker, name, "worker")
        if hasattr(worker.model_runner, "propose_draft_token_ids"):
            self.wrap(worker.model_runner, "propose_draft_token_ids", "draft")


def decode_batch(
    llm: Any, split: _Split, prompts: list[list[int]], new_tokens: int, temperature: float
) -> dict[str, Any]:
    """Generate new_tokens after each prompt, and time the steps in which all of them decode.

    The window opens when every request has a token and closes when the first one ends: what is timed is decoding at the
    full batch, without prefill and without the tail in which requests that got more drafts accepted have left.

    Returns:
        window_tokens, window_seconds, steps, step_seconds (median) and the window's worker_seconds and draft_seconds;
        drafts, draft_tokens and accepted_tokens (vLLM's own counters) and ours (our counters) of the whole turn;
        token_ids [requests][tokens];
        peak_bytes so far.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    params = SamplingParams(
        temperature=temperature, max_tokens=new_tokens, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    before, ours = _counters(llm), totals()
    ids: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        ids[str(index)] = []
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    steps: list[float] = []
    tokens = 0
    opened = closed = dict(split.seconds)
    finished = False
    while engine.has_unfinished_requests():
        decoding = all(ids.values()) and not finished
        started = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - started
        for output in outputs:
            ids[output.request_id] += output.outputs[0].token_ids
            tokens += len(output.outputs[0].token_ids) if decoding else 0
            finished = finished or output.finished
        if decoding:
            steps.append(seconds)
            closed = dict(split.seconds)
        elif not finished:
            opened = dict(split.seconds)
    if not steps:
        raise BenchError(f"{len(prompts)} requests never decoded together in {new_tokens} tokens; give more new tokens")
    change = {name: value - before[name] for name, value in _counters(llm).items()}
    parts = {part: closed.get(part, 0.0) - opened.get(part, 0.0) for part in ("worker", "draft")}
    return {
        "window_tokens": tokens,
        "window_seconds": sum(steps),
        "steps": len(steps),
        "step_seconds": statistics.median(steps),
        "worker_seconds": parts["worker"] if split.known else None,
        "draft_seconds": parts["draft"] if split.known else None,
        **change,
        "ours": {name: value - ours[name] for name, value in totals().items() if value != ours[name]},
        "token_ids": [ids[str(index)] for index in range(len(prompts))],
        "peak_bytes": peak_bytes(),
    }


def _counters(llm: Any) -> dict[str, int]:
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {name: int(found.get(f"vllm:spec_decode_num_{name}", 0)) for name in COUNTERS}


def peak_bytes(process: int | None = None) -> int:
    """The most memory ever held: of the GPU that this process uses, else resident, its workers' included."""
    import torch

    if process is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved()
    return sum(map(_peak_resident, _family(process or os.getpid())))


def _family(process: int) -> Iterator[int]:
    """A process and all that it started."""
    yield process
    listed = Path(f"/proc/{process}/task/{process}/children")
    for child in listed.read_text().split() if listed.exists() else []:
        yield from _family(int(child))


def _peak_resident(process: int) -> int:
    status = Path(f"/proc/{process}/status")
    for line in status.read_text().splitlines() if status.exists() else []:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def free_bytes() -> int:
    """Memory that further engines could take."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
