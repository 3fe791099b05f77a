# SPDX-License-Identifier: Apache-2.0
"""A system's engine in a separate process, which computes when it is its turn.

vLLM's engine core runs inside that process, so that its steps can be timed one by one.
Between turns it waits on a pipe.
"""

import contextlib
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from vllm_ppd.benchmarks.storage import Batch, BenchError
from vllm_ppd.benchmarks.systems import System

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
# With small pages the same product takes up to a tenth longer in one process than in
# another, depending on the memory that each got.
HUGE_PAGES = {
    "THP_MEM_ALLOC_ENABLE": "1",  # read by torch
    # For matrices that vLLM packs: separate memory for each, never reused.
    "GLIBC_TUNABLES": (
        "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=65536:glibc.malloc.mmap_max=1000000"
    ),
}
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
# vLLM labels this counter by "position", that of the draft
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


class EngineProcess:
    """The parent's side.

    Attributes:
        facts: num_layers and, of a worker group, split.
    """

    def __init__(
        self, system: System, arguments: dict[str, Any], log: Path
    ) -> None:
        """Start the engine and wait until it has loaded and compiled.

        Args:
            system: what to start.
            arguments: of vLLM's LLM, the same for all systems.
            log: where its output goes.

        Raises:
            BenchError: if it does not start, with the last line of its output.
        """
        self.name = system.name
        self.log = log
        log.touch()
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, system, arguments, str(log))
        )
        environment = dict(os.environ)
        # The child reads these before Python starts.
        os.environ.update(
            IN_PROCESS if torch.cuda.is_available() else IN_PROCESS | HUGE_PAGES
        )
        try:
            self.process.start()
        finally:
            os.environ.clear()
            os.environ.update(environment)
        theirs.close()
        try:
            self.facts: dict[str, Any] = self.receive()
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of function(engine, *arguments) in the process.

        Raises:
            BenchError: if the engine fails.
        """
        with contextlib.suppress(BrokenPipeError):  # receive() tells why
            self.pipe.send((function, arguments))
        return self.receive()

    def receive(self) -> Any:
        try:
            done, result = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            output = self.log.read_text(errors="replace").rstrip()
            last = output.rpartition("\n")[2] or "nothing"
            code = self.process.exitcode
            raise BenchError(
                f"{self.name}: the engine ended with code {code}; its last line: {last}"
            ) from None
        if not done:
            raise BenchError(f"{self.name}: {result}")
        return result

    def close(self) -> None:
        """End the process in any state."""
        self.pipe.close()
        self.process.join(timeout=15)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def serve(
    pipe: Connection, system: System, arguments: dict[str, Any], log: str
) -> None:
    """The child's side: start the engine, then call functions with it until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        engine = start(system, arguments)
        pipe.send((True, facts_of(engine)))
        while True:
            function, args = pipe.recv()
            pipe.send((True, function(engine, *args)))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send(
            (False, " ".join(str(error).split())[:400] or type(error).__name__)
        )


def start(system: System, arguments: dict[str, Any]) -> Any:
    """vLLM's engine of a system, in this process."""
    from vllm import LLM

    from vllm_ppd.vllm_plugins.platform import is_cpu

    if is_cpu():
        # vLLM's own methods sample wrongly on this backend; compare them without that
        # mistake.
        from vllm_ppd.vllm_plugins.engine.cpu.native import (
            mend_workers_to_come,
        )

        mend_workers_to_come()
    settings = {
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "speculative_config": system.speculative_config,
        **arguments,
        **system.engine,
    }
    return LLM(**settings).llm_engine


def facts_of(engine: Any) -> dict[str, Any]:
    """What the parent must know of an engine.

    Raises:
        BenchError: if not all requests of a batch fit in the KV cache.
    """
    from vllm_ppd.vllm_plugins.config.activation import active_config

    config = engine.vllm_config
    room = (
        config.cache_config.num_gpu_blocks or 0
    ) * config.cache_config.block_size
    needed = (
        config.scheduler_config.max_num_seqs * config.model_config.max_model_len
    )
    if room < needed:
        raise BenchError(
            f"the KV cache holds {room:,} of {needed:,} tokens; raise --kv-cache-gib"
        )
    ours = active_config(config)
    facts = {"num_layers": config.model_config.hf_text_config.num_hidden_layers}
    if ours is not None and ours.stages > 1:
        facts["split"] = ours.split
    return facts


def counters() -> Counter[tuple[str, str]]:
    """All counts of the process, by name and position, summed over other labels."""
    from prometheus_client import REGISTRY

    values: Counter[tuple[str, str]] = Counter()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            # Counters alone, and no times
            if sample.name.endswith("_total") and "_seconds" not in sample.name:
                position = sample.labels.get("position", "")
                values[sample.name, position] += int(sample.value)
    return values


def add_requests(
    engine: Any,
    prompts: Batch,
    new_tokens: int,
    temperature: float,
    top_p: float,
    first: int = 0,
) -> list[str]:
    """Send a batch; returns the requests' names, which count from `first`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p if temperature else 1.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    names = [str(first + number) for number in range(len(prompts))]
    for name, ids in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    return names


def decode_batch(
    engine: Any,
    prompts: Batch,
    new_tokens: int,
    temperature: float,
    top_p: float,
) -> dict[str, Any]:
    """Decode prompts as one batch.

    Only steps in which all requests decode are timed: not prefill, and not the tail in
    which some requests have ended.

    Returns:
        window_tokens, window_seconds, steps: of the timed steps.
        request_steps: decode steps of all requests.
        drafts, draft_tokens, accepted_tokens: as vLLM counts them.
        accepted_lengths: drafts of which 0, 1, 2, ... tokens were accepted.
        ours: counters of this package.
        peak_bytes: so far; None where workers are further processes.
        token_ids: [requests][tokens].

    Raises:
        BenchError: if no step was timed.
    """
    before = counters()
    tokens: dict[str, list[int]] = {
        name: []
        for name in add_requests(engine, prompts, new_tokens, temperature, top_p)
    }
    seconds = 0.0
    steps = 0
    window_tokens = 0
    request_steps = 0
    finished = False
    while engine.has_unfinished_requests():
        timed = all(tokens.values()) and not finished
        started = time.perf_counter()
        outputs = engine.step()
        elapsed = time.perf_counter() - started
        made = 0
        for output in outputs:
            if tokens[output.request_id]:
                request_steps += 1
            tokens[output.request_id] += output.outputs[0].token_ids
            made += len(output.outputs[0].token_ids)
            finished |= output.finished
        if timed:
            seconds += elapsed
            steps += 1
            window_tokens += made
    if not steps:
        raise BenchError(
            f"{len(prompts)} requests never all decoded at once; raise "
            "--output-len"
        )
    change = counters() - before
    drafts = change[DRAFTS, ""]
    reached = [
        drafts
    ]  # drafts of which at least 0, 1, 2, ... tokens were accepted
    while change[ACCEPTED_AT, str(len(reached) - 1)]:
        reached.append(change[ACCEPTED_AT, str(len(reached) - 1)])
    lengths = [more - less for more, less in pairwise([*reached, 0])]
    ours = {
        name.removeprefix("ppd:").removesuffix("_total"): value
        for (name, _), value in change.items()
        if name.startswith("ppd:")
    }
    return {
        "window_tokens": window_tokens,
        "window_seconds": seconds,
        "steps": steps,
        "request_steps": request_steps,
        "drafts": drafts,
        "draft_tokens": change[DRAFT_TOKENS, ""],
        "accepted_tokens": change[ACCEPTED_TOKENS, ""],
        "accepted_lengths": lengths,
        "ours": ours,
        "peak_bytes": peak_bytes(engine),
        "token_ids": list(tokens.values()),
    }


def peak_bytes(engine: Any) -> int | None:
    """The most bytes ever held: of the GPU, else resident."""
    if engine.vllm_config.parallel_config.world_size > 1:
        return None
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
