# SPDX-License-Identifier: Apache-2.0
"""`ppd bench closed-loop`: whether heads are ever slower than vLLM alone, on a machine whose speed drifts.

Engines of one process decode the same requests in turns of a few steps. Each contender's turn is between two of vLLM
alone, whose speed then is the machine's: 1 A 2 B 3 and back, then 2 B 3 A 1 and back, and so on: there is one engine of
vLLM alone more than contenders. A contender's two turns, and those beside them, are a pair. Heads draft as a
server would let them (adaptive); the first --warm-up steps of each engine at a load are not counted.

Engines of one process read one copy of equal weights, in huge pages where the system has them: see share_weights.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.decode.options import ClosedLoopOptions
from vllm_ppd.benchmarks.decode.run import Load, loads_of
from vllm_ppd.benchmarks.harness.contenders import BASE, Contender, contenders
from vllm_ppd.benchmarks.harness.engine import Engine, share_weights
from vllm_ppd.benchmarks.harness.machine import restart_for_engines, undisturbed
from vllm_ppd.benchmarks.harness.prompts import read_prompts
from vllm_ppd.benchmarks.harness.results import Results, Turn, all_runs
from vllm_ppd.benchmarks.harness.session import Session
from vllm_ppd.vllm_plugins.config.naming import is_ours

VERIFYING = f"{BASE}, several requests"  # as many as --verified says


class Pair(NamedTuple):
    """A contender's turns there and back, and those of vLLM alone right before and after them."""

    tokens: int
    seconds: float
    drafting: int  # steps with drafts
    plain_tokens: int
    plain_seconds: float


class Steps(NamedTuple):
    """A turn: a few steps of an engine."""

    tokens: int
    seconds: float
    drafting: int = 0


def closed_loop(options: ClosedLoopOptions) -> list[Results]:
    """Measure every contender at every temperature and batch size; further runs add pairs.

    Returns:
        The run of each temperature.

    Raises:
        BenchError, HeadsError, TrainingError: on input that does not fit, or if the base does not start.
        Stopped: on Ctrl-C.
    """
    plain, others = line_up(options)
    restart_for_engines()
    order = between(others, plain, 0)  # who starts first finds other memory than who starts last
    runs = all_runs(options, order)
    rounds = options.rounds * (1 + max(len(run.earlier) for run in runs))
    texts = -(-rounds // options.rounds_a_text) if options.rounds_a_text else max(options.batch_sizes)
    prompts = read_prompts(options.data, options.model, options.prompt_tokens, texts, options.trust_remote_code)
    SideBySide(options, loads_of(options, runs), plain, others, prompts).measure(order)
    return runs


def line_up(options: ClosedLoopOptions) -> tuple[list[Contender], list[Contender]]:
    """Contenders of vLLM alone, and those held against them, which are one fewer.

    Raises:
        BenchError, HeadsError: if there is nobody to compare, or a contender is wrong.
    """
    base, control, *others = contenders(options)
    if options.always:
        others = [_always(one) for one in others]
    if options.verified:
        others.append(Contender(VERIFYING, None, {"max_num_seqs": max(options.verified, *options.batch_sizes)}))
    if not others:
        raise BenchError("nobody is compared with vLLM alone; give heads folders with --heads")
    return [base, control, *(Contender(f"{BASE}, {number}") for number in range(3, len(others) + 2))], others


def _always(one: Contender) -> Contender:
    """With drafts in every step, where a contender is ours."""
    config = one.speculative_config
    ours = config is not None and is_ours(config)
    return replace(one, speculative_config={**(config or {}), "adaptive": False}) if ours else one


def between(others: Sequence[Contender], plain: Sequence[Contender], first: int) -> list[Contender]:
    """1 A 2 B 3: the others, the first-th at first, each between two of vLLM alone."""
    begin = first % len(others)
    others = [*others[begin:], *others[:begin]]
    begin = first % len(plain)
    head, *tail = [*plain[begin:], *plain[:begin]]
    return [head, *(one for both in zip(others, tail, strict=True) for one in both)]


def paired(taken: list[tuple[str, Steps]], plain: set[str]) -> dict[str, Pair]:
    """What turns in a row amount to, for each engine; those of vLLM alone are held against all of these."""
    beside: dict[str, list[Steps]] = {}
    own: dict[str, list[Steps]] = {}
    for i, (name, turn) in enumerate(taken):
        own.setdefault(name, []).append(turn)
        if name not in plain:
            beside.setdefault(name, []).extend((taken[i - 1][1], taken[i + 1][1]))
    every = [turn for name, turn in taken if name in plain]
    return {
        name: Pair(
            sum(turn.tokens for turn in turns), sum(turn.seconds for turn in turns),
            sum(turn.drafting for turn in turns), sum(turn.tokens for turn in beside.get(name, every)),
            sum(turn.seconds for turn in beside.get(name, every)),
        )
        for name, turns in own.items()
    }  # fmt: skip


class SideBySide(Session[Engine, Load]):
    """Engines of this process, all alive at once."""

    options: ClosedLoopOptions

    def __init__(self, options: ClosedLoopOptions, loads: dict[Load, Results], plain: list[Contender],
                 others: list[Contender], prompts: list[list[int]]) -> None:  # fmt: skip
        super().__init__(options, loads)
        self.plain, self.others, self.prompts = plain, others, prompts

    def start(self, contender: Contender, log: Path) -> Engine:
        share_weights()
        return Engine(contender, self.options.engine_arguments)

    def room(self, facts: dict[str, Any]) -> int:
        return sys.maxsize

    def warm_up(self, one: Engine, load: Load) -> None:
        self.begin(one, load, 0)
        for _ in range(self.options.warm_up // self.options.steps):
            turn(one, self.options.steps)
            if not one.whole:
                self.begin(one, load, 0)

    def begin(self, one: Engine, load: Load, number: int) -> None:
        """Take the prompts of a round in."""
        size = self.options.verified if one.name == VERIFYING else load.batch
        if each := self.options.rounds_a_text:
            text = (self.loads[load].rounds_before(batch=load.batch) + number) // each
            chosen = [self.prompts[text % len(self.prompts)]] * size
        else:
            chosen = [self.prompts[i % len(self.prompts)] for i in range(size)]
        one.begin(chosen, self.options.new_tokens, load.temperature)

    def round(self, load: Load, number: int) -> Iterator[Turn]:
        """A pair of turns of each, in all of which every request decodes."""
        if self.options.rounds_a_text and number % self.options.rounds_a_text == 0:
            self.begin_all(load, number)
        found = undisturbed(self.options.most_stolen, lambda: self.there_and_back(load, number))
        for name, pair in (found or {}).items():
            yield {"contender": name, "batch": load.batch, **pair._asdict()}

    def begin_all(self, load: Load, number: int) -> None:
        for one in self.alive:
            self.begin(one, load, number)

    def there_and_back(self, load: Load, number: int) -> dict[str, Pair] | None:
        """None if a request ended."""
        if not all(one.whole for one in self.alive):
            self.begin_all(load, number)
        engines = {one.name: one for one in self.alive}
        there = [one.name for one in between(self.others, self.plain, number)]
        taken = [(name, turn(engines[name], self.options.steps)) for name in [*there, *reversed(there)]]
        whole = all(one.whole for one in self.alive)
        return paired(taken, {one.name for one in self.plain}) if whole else None


def turn(engine: Engine, steps: int) -> Steps:
    """So many steps of an engine, after one that finds its weights in no cache."""
    engine.step()
    before, started, tokens = engine.counts["drafting"], time.perf_counter(), 0
    for _ in range(steps):
        tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
    return Steps(tokens, time.perf_counter() - started, engine.counts["drafting"] - before)
