# SPDX-License-Identifier: Apache-2.0
"""Who computes when: A B C A B C ..., one at a time, the base first in each round."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_ppd.vllm_plugins.bench import BenchError
from vllm_ppd.vllm_plugins.bench.contenders import Contender, contenders
from vllm_ppd.vllm_plugins.bench.engine import Engine
from vllm_ppd.vllm_plugins.bench.options import DecodeOptions
from vllm_ppd.vllm_plugins.bench.prompts import read_prompts
from vllm_ppd.vllm_plugins.bench.results import Results

WARM_UP_TOKENS = 16
SPIN_SECONDS = 1.2  # vLLM's ranks spin for a second after a step before they sleep
MEMORY_SHARE = 0.8  # of what is free, for further engines


class Stopped(KeyboardInterrupt):
    """Stopped by the user; what was measured is kept."""


def decode(options: DecodeOptions, everyone: list[Contender] | None = None) -> Results:
    """Measure every contender at every batch size, and keep each turn in options.out.

    Args:
        options: of the run.
        everyone: who is compared, the base first (None: whom the options name).

    Raises:
        BenchError, HeadsError, TrainingError: on input that does not fit, or if the base does not start.
        Stopped: on Ctrl-C.
    """
    everyone = everyone or contenders(options)
    results = Results(options, everyone)
    wanted = options.rounds * sum(options.batch_sizes)
    skipped = wanted * len(results.earlier)  # a further run takes further prompts
    prompts = read_prompts(
        options.data, options.model, options.prompt_tokens, skipped + wanted, options.trust_remote_code
    )
    results.run["distinct_prompts"] = min(len(prompts), wanted)
    if len(prompts) < wanted:
        print(f"{len(prompts)} prompts for {wanted} requests: they come again, which flatters suffix decoding")
    batches = {
        (size, number): [prompts[(skipped + start + i) % len(prompts)] for i in range(size)]
        for size, number, start in _places(options)
    }
    with tempfile.TemporaryDirectory(prefix="ppd-bench-") as logs:
        session = _Session(options, results, batches, Path(logs))
        try:
            session.run(everyone)
        except KeyboardInterrupt:
            kept = len(results.run["turns"])
            raise Stopped(f"stopped; {kept} turns are kept in {options.out}, the same command adds to them") from None
        finally:
            session.close()
    results.finish()
    return results


def _places(options: DecodeOptions) -> Iterator[tuple[int, int, int]]:
    """(batch size, round, first of its prompts)"""
    start = 0
    for size in options.batch_sizes:
        for number in range(options.rounds):
            yield size, number, start
            start += size


class _Session:
    """The engines that are alive, and their turns."""

    def __init__(
        self, options: DecodeOptions, results: Results, batches: dict[tuple[int, int], list[list[int]]], logs: Path
    ) -> None:
        self.options, self.results, self.batches, self.logs = options, results, batches, logs
        self.engines: list[Engine] = []
        self.started = 0

    def run(self, everyone: list[Contender]) -> None:
        """The base stays; the others come in groups of as many as there is room for."""
        base, *others = everyone
        self._start(base)
        room = self._room(self.engines[0].facts)
        progress = tqdm(
            total=self.options.rounds * len(self.options.batch_sizes) * len(others), desc="turns", mininterval=1
        )
        with progress:
            for group, first in enumerate(range(0, len(others), room)):
                for contender in others[first : first + room]:
                    try:
                        self._start(contender)
                    except BenchError as error:
                        self._failed(contender.name, error)
                for size in self.options.batch_sizes:
                    self._batch_size(size, group, progress)
                self.close(keep=1)

    def _start(self, contender: Contender) -> None:
        self.started += 1
        log = self.logs / f"{self.started}.log"
        print(f"starting {contender.name} ...", flush=True)
        engine = Engine(contender, self.options.engine_arguments, log)
        needed = max(self.options.batch_sizes) * self.options.engine_arguments["max_model_len"]
        room = engine.facts["kv_cache_tokens"]
        if room < needed:
            engine.close()
            raise BenchError(
                f"{contender.name}: {self.options.kv_cache_gib} GiB of KV cache hold {room:,} of {needed:,} tokens; "
                "give more with --kv-cache-gib"
            )
        self.engines.append(engine)

    def _room(self, facts: dict[str, Any]) -> int:
        """Contenders alive beside the base."""
        if self.options.alive is not None:
            return self.options.alive - 1
        return max(1, int(MEMORY_SHARE * facts["free_bytes"] / facts["peak_bytes"]))

    def _batch_size(self, size: int, group: int, progress: Any) -> None:
        for engine in list(self.engines):
            backwards = [prompt[::-1] for prompt in self.batches[size, 0]]  # other text than what is measured
            self._turn(engine, backwards, WARM_UP_TOKENS)
        for number in range(self.options.rounds):
            said: list[list[int]] = []  # by the base
            for engine in list(self.engines):
                turn = self._turn(engine, self.batches[size, number], self.options.new_tokens)
                if turn is None:
                    continue
                ids = turn.pop("token_ids")
                said = said or ids
                place = {"contender": engine.name, "batch": size, "group": group, "round": number}
                self.results.add(place | turn | _same(said, ids, self.options.temperature) | _repeats(ids))
                progress.update(engine is not self.engines[0])

    def _turn(self, engine: Engine, prompts: list[list[int]], tokens: int) -> dict[str, Any] | None:
        if any(other.ranks > 1 for other in self.engines if other is not engine):
            time.sleep(SPIN_SECONDS)
        try:
            return engine.turn(prompts, tokens, self.options.temperature)
        except BenchError as error:
            if engine is self.engines[0]:
                raise
            self._failed(engine.name, error)
            self.engines.remove(engine)
            engine.close()
            return None

    def _failed(self, name: str, error: BenchError) -> None:
        tqdm.write(f"left out: {error}")
        self.results.fail(name, str(error))

    def close(self, keep: int = 0) -> None:
        for engine in self.engines[keep:]:
            engine.close()
        del self.engines[keep:]


def _same(said: list[list[int]], ids: list[list[int]], temperature: float) -> dict[str, int]:
    """Tokens equal to the base's at their place, of greedy texts."""
    pairs = [] if temperature else [pair for a, b in zip(said, ids, strict=True) for pair in zip(a, b, strict=True)]
    return {"same_tokens": sum(a == b for a, b in pairs), "compared_tokens": len(pairs)}


def _repeats(ids: list[list[int]]) -> dict[str, int]:
    """4-grams that occurred before in their text: loops flatter acceptance."""
    repeated = total = 0
    for row in ids:
        grams = [tuple(row[i : i + 4]) for i in range(len(row) - 3)]
        repeated, total = repeated + len(grams) - len(set(grams)), total + len(grams)
    return {"repeated_4_grams": repeated, "all_4_grams": total}
