# SPDX-License-Identifier: Apache-2.0
"""`ppd bench decode`: which batch is whose turn, and what is kept of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.decode.table import table
from vllm_ppd.benchmarks.harness.batch import repeats
from vllm_ppd.benchmarks.harness.contenders import Contender, contenders
from vllm_ppd.benchmarks.harness.process import EngineProcess
from vllm_ppd.benchmarks.harness.prompts import read_prompts
from vllm_ppd.benchmarks.harness.results import Results, Turn, all_runs
from vllm_ppd.benchmarks.harness.session import OneByOne

WARM_UP_TOKENS = 48  # enough for adaptive drafting to have timed its steps, which a server does once
SPIN_SECONDS = 1.2  # vLLM's ranks spin for a second after a step before they sleep


class Load(NamedTuple):
    """What all contenders decode in a round."""

    temperature: float
    batch: int  # requests


def run(options: DecodeOptions) -> str:
    """Measure; the table of each temperature."""
    return "\n\n".join(map(table, decode(options)))


def decode(options: DecodeOptions, everyone: list[Contender] | None = None, **facts: Any) -> list[Results]:
    """Measure every contender at every temperature and batch size, and keep each turn in options.out.

    Args:
        options: of the run.
        everyone: who is compared, the base first (None: whom the options name).
        facts: to be kept with the run.

    Returns:
        The run of each temperature.

    Raises:
        BenchError, HeadsError, TrainingError: on input that does not fit, or if the base does not start.
        Stopped: on Ctrl-C.
    """
    everyone = everyone or contenders(options)
    runs = all_runs(options, everyone, **facts)
    others = max(options.batch_sizes)  # to warm up with: other texts than what is measured, of the same kind
    wanted = options.rounds * sum(options.batch_sizes)
    skipped = others + wanted * max(len(run.earlier) for run in runs)  # a further run takes further prompts
    prompts = read_prompts(
        options.data, options.model, options.prompt_tokens, skipped + wanted, options.trust_remote_code
    )
    for results in runs:
        results.run["distinct_prompts"] = min(len(prompts), wanted)
    if len(prompts) < wanted:
        print(f"{len(prompts)} prompts for {wanted} requests: they come again, which flatters suffix decoding")
    batches = {
        (size, number): [prompts[(skipped + start + i) % len(prompts)] for i in range(size)]
        for size, number, start in _places(options)
    }
    _Decoding(options, loads_of(options, runs), batches, [prompts[i % len(prompts)] for i in range(others)]).measure(
        everyone
    )
    return runs


def _places(options: DecodeOptions) -> Iterator[tuple[int, int, int]]:
    """(batch size, round, first of its prompts)"""
    start = 0
    for size in options.batch_sizes:
        for number in range(options.rounds):
            yield size, number, start
            start += size


def loads_of(options: DecodeOptions, runs: list[Results]) -> dict[Load, Results]:
    """Each temperature and batch size, with the run that its turns are kept in."""
    return {
        Load(run.temperature, size): results
        for run, results in zip(options.runs, runs, strict=True)
        for size in options.batch_sizes
    }


class _Decoding(OneByOne[EngineProcess, Load]):
    """Engines in processes of their own; every temperature has the same prompts."""

    def __init__(
        self,
        options: DecodeOptions,
        loads: dict[Load, Results],
        batches: dict[tuple[int, int], list[list[int]]],
        others: list[list[int]],
    ) -> None:
        super().__init__(options, loads)
        self.batches, self.others, self.new_tokens = batches, others, options.new_tokens
        self.arguments = options.engine_arguments
        self.said: list[list[int]] = []  # by the base in this round

    def start(self, contender: Contender, log: Path) -> EngineProcess:
        return EngineProcess(contender, self.arguments, log)

    def ready(self, one: EngineProcess) -> None:
        one.ready()
        needed = max(load.batch for load in self.loads) * self.arguments["max_model_len"]
        room = one.facts["kv_cache_tokens"]
        if room < needed:
            raise BenchError(
                f"{one.name}: {self.options.kv_cache_gib} GiB of KV cache hold {room:,} of {needed:,} tokens; "
                "give more with --kv-cache-gib"
            )

    def warm_up(self, one: EngineProcess, load: Load) -> None:
        one.turn(self.others[: load.batch], min(WARM_UP_TOKENS, self.new_tokens), load.temperature)

    def turn(self, one: EngineProcess, load: Load, number: int) -> Turn:
        if any(other.ranks > 1 for other in self.alive if other is not one):
            time.sleep(SPIN_SECONDS)
        turn = one.turn(self.batches[load.batch, number], self.new_tokens, load.temperature)
        ids = turn.pop("token_ids")
        if one is self.alive[0]:
            self.said = ids
        return {"batch": load.batch} | turn | _same(self.said, ids, load.temperature) | repeats(ids)


def _same(said: list[list[int]], ids: list[list[int]], temperature: float) -> dict[str, int]:
    """Tokens equal to the base's at their place, of greedy texts."""
    pairs = [] if temperature else [pair for a, b in zip(said, ids, strict=True) for pair in zip(a, b, strict=True)]
    return {"same_tokens": sum(a == b for a, b in pairs), "compared_tokens": len(pairs)}
