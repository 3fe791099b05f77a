# SPDX-License-Identifier: Apache-2.0
"""`ppd bench decode`: the turns of batches, and their results."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode import group
from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.decode.table import rows_of, table
from vllm_ppd.benchmarks.harness.contenders import Contender, contenders
from vllm_ppd.benchmarks.harness.estimates import repeats
from vllm_ppd.benchmarks.harness.process import EngineProcess, SharedEngine
from vllm_ppd.benchmarks.harness.prompts import read_prompts
from vllm_ppd.benchmarks.harness.results import Results, Turn, all_runs
from vllm_ppd.benchmarks.harness.session import Session

WARM_UP_TOKENS = 48  # enough for adaptive drafting to time its steps
TRACED_STEPS = 20
Running = EngineProcess | SharedEngine
SPIN_SECONDS = 1.2  # vLLM's ranks spin for a second after a step before they sleep


class Load(NamedTuple):
    """The batch that all contenders decode in a round."""

    temperature: float
    batch: int  # requests


def run(options: DecodeOptions) -> str:
    """Measure; returns the table of each temperature."""
    from transformers import AutoConfig

    everyone = group.contenders(options) if options.group else contenders(options)
    runs = decode(options, everyone)
    if options.group:
        config = AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
        num_layers = config.get_text_config().num_hidden_layers
        configs = {contender.name: contender.speculative_config for contender in everyone}
        for results in runs:
            predicted = group.predictions(rows_of(results), configs, num_layers, options.new_tokens)
            results.finish(predicted=predicted)
    return "\n\n".join(map(table, runs))


def decode(options: DecodeOptions, everyone: list[Contender]) -> list[Results]:
    """Measure every contender at every temperature and batch size, and write each turn to options.out.

    Args:
        options: of the run.
        everyone: the contenders, the base first.

    Returns:
        The run of each temperature.

    Raises:
        BenchError, HeadsError, TrainingError: on input that does not fit, or if the base does not start.
        Stopped: on Ctrl-C.
    """
    runs = all_runs(options, everyone)
    others = max(options.batch_sizes)  # for warm-up: other texts of the same kind
    wanted = options.rounds * sum(options.batch_sizes)
    skipped = others + wanted * max(len(results.earlier) for results in runs)  # a further run uses further prompts
    prompts = read_prompts(
        options.data, options.model, options.prompt_tokens, skipped + wanted, options.trust_remote_code
    )
    for results in runs:
        results.run["distinct_prompts"] = min(len(prompts), wanted)
    if len(prompts) < wanted:
        print(f"{len(prompts)} prompts for {wanted} requests: they repeat, which favours suffix decoding")
    batches: dict[tuple[int, int], list[list[int]]] = {}  # by size and round
    for size in options.batch_sizes:
        for number in range(options.rounds):
            batches[size, number] = [prompts[(skipped + i) % len(prompts)] for i in range(size)]
            skipped += size
    loads = {
        Load(temperature.temperature, size): results
        for temperature, results in zip(options.runs, runs, strict=True)
        for size in options.batch_sizes
    }
    _Decoding(options, loads, batches, [prompts[i % len(prompts)] for i in range(others)]).measure(everyone)
    return runs


class _Decoding(Session[Running, Load]):
    """Engines in separate processes; every temperature has the same prompts."""

    options: DecodeOptions

    def __init__(
        self,
        options: DecodeOptions,
        loads: dict[Load, Results],
        batches: dict[tuple[int, int], list[list[int]]],
        others: list[list[int]],
    ) -> None:
        super().__init__(options, loads)
        self.batches, self.others = batches, others
        self.arguments = options.engine_arguments
        self.text_of_base: list[list[int]] = []  # of this round

    def start(self, contender: Contender, log: Path) -> Running:
        if contender.shares is None:
            return EngineProcess(contender, self.arguments, log)
        engines = {engine.name: engine for engine in self.alive if isinstance(engine, EngineProcess)}
        if contender.shares not in engines or self.options.turn_steps is not None:
            raise BenchError(f'{contender.name}: "shares" needs {contender.shares} to run, and no --turn-steps')
        return SharedEngine(contender, engines[contender.shares])

    def settle(self, running: Running) -> None:
        if self.options.together and isinstance(running, EngineProcess):
            running.call("time_steps")

    def ready(self, running: Running) -> None:
        running.ready()
        needed = max(load.batch for load in self.loads) * self.arguments["max_model_len"]
        room = running.facts["kv_cache_tokens"]
        if room < needed:
            raise BenchError(
                f"{running.name}: {self.options.kv_cache_gib} GiB of KV cache hold only {room:,} of {needed:,} tokens; "
                "give more with --kv-cache-gib"
            )

    def warm_up(self, running: Running, load: Load) -> None:
        running.call("turn", self.others[: load.batch], min(WARM_UP_TOKENS, self.options.new_tokens), load.temperature)

    def turn(self, running: Running, load: Load, number: int) -> Turn:
        if any(other.ranks > 1 for other in self.alive if other is not running):
            time.sleep(SPIN_SECONDS)
        return self._turn(running, load, running.call("turn", *self._request(load, number)))

    def after(self, running: Running, load: Load) -> None:
        if running.name in self.options.traces:
            name = f"{running.name}-batch-{load.batch}-temperature-{load.temperature}".replace(" ", "-")
            running.call("begin", *self._request(load, 0))
            running.call("advance", TRACED_STEPS)
            running.call("trace", f"{Path(self.options.out).with_suffix('')}-{name}.json.gz", TRACED_STEPS)
            running.call("end")

    def round(self, load: Load, number: int) -> Iterator[Turn]:
        """Let each decode a whole batch, or turns of a few steps in alternating order until a request ends."""
        steps = self.options.turn_steps
        if steps is None:
            yield from super().round(load, number)
            return
        for engine in list(self.alive):
            self.attempt(engine, engine.call, "begin", *self._request(load, number))
        order, decoding = 1, True
        while decoding:
            going = [self.attempt(engine, engine.call, "advance", steps) for engine in self.alive[::order]]
            order, decoding = -order, False not in going
        for engine in list(self.alive):
            ended = self.attempt(engine, engine.call, "end")
            if ended is not None:
                yield {"contender": engine.name} | self._turn(engine, load, ended)

    def _request(self, load: Load, number: int) -> tuple[list[list[int]], int, float, float]:
        return self.batches[load.batch, number], self.options.new_tokens, load.temperature, self.options.top_p

    def _turn(self, engine: Running, load: Load, ended: dict[str, Any]) -> Turn:
        """The record of a batch that has ended."""
        ids = ended.pop("token_ids")
        if engine is self.alive[0]:
            self.text_of_base = ids
        return {"batch": load.batch} | ended | _same(self.text_of_base, ids, load.temperature) | repeats(ids)


def _same(base: list[list[int]], ids: list[list[int]], temperature: float) -> dict[str, int]:
    """Tokens of greedy texts that equal the base's at the same position, as far as both go."""
    compared = [] if temperature else [both for a, b in zip(base, ids, strict=True) for both in zip(a, b, strict=False)]
    return {"same_tokens": sum(a == b for a, b in compared), "compared_tokens": len(compared)}
