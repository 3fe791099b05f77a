# SPDX-License-Identifier: Apache-2.0
"""`ppd bench decode`: systems decode the same batches in turns.

With --acceptance they decode all prompts once, with drafts in every step.
"""

import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tqdm import tqdm

from vllm_ppd.benchmarks.engine import EngineProcess, decode_batch
from vllm_ppd.benchmarks.prompts import Prompt, read_prompts
from vllm_ppd.benchmarks.report import report
from vllm_ppd.benchmarks.storage import (
    BASE,
    Batch,
    BenchError,
    Results,
    Run,
    turns_of,
)
from vllm_ppd.benchmarks.systems import DecodeOptions, System, systems_of
from vllm_ppd.heads.planning import theorem_4_1
from vllm_ppd.vllm_plugins.platform import kv_cache

WARM_UP_TOKENS = 48  # enough to compile kernels and to settle adaptive drafting
# vLLM's ranks spin for a second after a step before they sleep
SPIN_SECONDS = 1.2


class Trial(NamedTuple):
    """A batch that every system decodes in turn, and the keys of its turns in the file."""

    place: dict[str, Any]
    prompts: Batch


def decode(options: DecodeOptions) -> str:
    """Measure what the file of results lacks; returns the tables.

    A trial that was stopped between two systems is measured again as a whole, since
    ratios are between neighbors.

    Raises:
        BenchError, HeadsError: on bad input, or if vLLM alone fails.
        KeyboardInterrupt: on Ctrl-C; turns that have ended are kept.
    """
    systems = systems_of(options)
    prompts = read_prompts(
        options.data,
        options.model,
        options.prompt_tokens,
        options.trust_remote_code,
    )
    trials_of = acceptance_trials if options.acceptance else speed_trials
    trials = trials_of(options, prompts)
    results = Results(Path(options.out))
    contenders = {system.name: system.identity() for system in systems}
    runs = [
        results.run_of(
            {**options.essence(), "temperature": temperature}, contenders
        )
        for temperature in options.temperatures
    ]
    missing = [
        (run, trial)
        for run in runs
        for trial in trials
        if not is_whole(trial, run)
    ]
    if missing:
        others = [prompt.ids for prompt in prompts[-max(options.batch_sizes) :]]
        try:
            measure(options, systems, missing, others, results)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"stopped; turns are kept in {options.out}, and the same command continues"
            ) from None
    return report(runs)


def is_whole(trial: Trial, run: Run) -> bool:
    """Whether all systems but those that failed have had their turns."""
    measured = {turn["contender"] for turn in turns_of(run, **trial.place)}
    return run["contenders"].keys() <= measured | run["failures"].keys()


def speed_trials(options: DecodeOptions, prompts: list[Prompt]) -> list[Trial]:
    """A batch of further prompts for each round and size; too few prompts come again."""
    ids = [prompt.ids for prompt in prompts]
    wanted = options.rounds * sum(options.batch_sizes)
    if len(ids) < wanted:
        print(
            f"{len(ids)} prompts for {wanted} requests: prompts are used more than once"
        )
    trials = []
    first = 0
    for number in range(options.rounds):
        for size in options.batch_sizes:
            batch = [
                ids[index % len(ids)] for index in range(first, first + size)
            ]
            trials.append(Trial({"batch": size, "round": number}, batch))
            first += size
    return trials


def acceptance_trials(
    options: DecodeOptions, prompts: list[Prompt]
) -> list[Trial]:
    """Batches of the prompts of a category, the shortest first."""
    by_category: defaultdict[str, Batch] = defaultdict(list)
    for prompt in prompts[: options.num_prompts]:
        by_category[prompt.category].append(prompt.ids)
    size = max(options.batch_sizes)
    trials: list[Trial] = []
    for category, ids in sorted(by_category.items()):
        ids.sort(key=len)
        for first in range(0, len(ids), size):
            place = {"batch": size, "part": len(trials), "category": category}
            trials.append(Trial(place, ids[first : first + size]))
    return trials


def engine_arguments(
    options: DecodeOptions, max_model_len: int
) -> dict[str, Any]:
    """The arguments of every engine."""
    return {
        "model": options.model,
        "dtype": options.dtype,
        "enforce_eager": options.enforce_eager,
        "seed": options.seed,
        "trust_remote_code": options.trust_remote_code,
        "max_num_seqs": max(options.batch_sizes),
        "max_model_len": max_model_len,
        "max_num_batched_tokens": 4096 if options.acceptance else 1024,
        "enable_prefix_caching": False,
        **kv_cache(options.kv_cache_gib),
        **options.engine,
    }


def measure(
    options: DecodeOptions,
    systems: list[System],
    missing: list[tuple[Run, Trial]],
    others: Batch,
    results: Results,
) -> None:
    """Start the engines, let each decode each trial in turn, and write every turn when
    it ends.

    Args:
        options: of the benchmark.
        systems: what is compared; those that fail are left out from then on.
        missing: trials, each with the run to which its turns are added.
        others: prompts to warm up with.
        results: the file.

    Raises:
        BenchError: if vLLM alone fails.
    """
    runs = [run for run, _ in missing]
    engines: list[EngineProcess] = []
    warm: set[tuple[str, tuple[float, float], int]] = set()
    longest = max(
        len(ids) for _, trial in missing for ids in [*trial.prompts, *others]
    )
    arguments = engine_arguments(options, longest + options.output_len + 32)

    def leave_out(name: str, error: BenchError) -> None:
        if name == BASE:
            raise error
        print(f"left out: {error}")
        for run in runs:
            run["failures"][name] = str(error)
        results.write()

    def take_turn(
        engine: EngineProcess, trial: Trial, run: Run
    ) -> dict[str, Any]:
        size = trial.place["batch"]
        sampling = run["options"]["temperature"], options.top_p
        state = (engine.name, sampling, size)
        if state not in warm:
            tokens = min(WARM_UP_TOKENS, options.output_len)
            engine.call(decode_batch, others[:size], tokens, *sampling)
            warm.add(state)
        if options.group:
            time.sleep(SPIN_SECONDS)
        return engine.call(
            decode_batch, trial.prompts, options.output_len, *sampling
        )

    with TemporaryDirectory(prefix="ppd-bench-") as logs, ExitStack() as running:
        for number, system in enumerate(systems):
            if any(system.name in run["failures"] for run in runs):
                continue
            print(f"starting {system.name} ...", flush=True)
            try:
                engine = EngineProcess(
                    system, arguments, Path(logs, f"{number}.log")
                )
            except BenchError as error:
                leave_out(system.name, error)
                continue
            running.callback(engine.close)
            engines.append(engine)
        for run, trial in tqdm(missing, desc="trials", mininterval=1):
            stopped = turns_of(run, **trial.place)
            run["turns"] = [turn for turn in run["turns"] if turn not in stopped]
            base_ids: Batch = []
            for engine in list(engines):
                try:
                    turn = take_turn(engine, trial, run)
                except BenchError as error:
                    leave_out(engine.name, error)
                    engines.remove(engine)
                    continue
                ids = turn.pop("token_ids")
                if engine.name == BASE:
                    base_ids = ids
                if not run["options"]["temperature"]:
                    turn |= compare(base_ids, ids)
                turn["prompts"] = len(ids)
                run["turns"].append(
                    {"contender": engine.name, **trial.place, **turn}
                )
                if options.group:
                    run["predicted"] = predictions(
                        engines, run, options.output_len
                    )
                results.write()


def compare(base: Batch, ids: Batch) -> dict[str, Any]:
    """How many greedy tokens equal those of vLLM alone by position, and which texts do not."""
    pairs = list(zip(base, ids, strict=True))
    return {
        "same_tokens": sum(
            a == b
            for one, other in pairs
            for a, b in zip(one, other, strict=True)
        ),
        "compared_tokens": sum(len(one) for one in base),
        "differ": [
            number for number, (one, other) in enumerate(pairs) if one != other
        ],
    }


def predictions(
    engines: list[EngineProcess], run: Run, new_tokens: int
) -> dict[str, float]:
    """Speed-ups that Theorem 4.1 expects of worker groups at their match rates."""
    predicted = {}
    for engine in engines:
        counts: Counter[str] = Counter()
        for turn in turns_of(run, contender=engine.name):
            counts.update(turn["ours"])
        hits = counts["group_hits"]
        tried = hits + counts["group_misses"]
        if tried:
            layers = engine.facts["num_layers"]
            config = run["contenders"][engine.name]["speculative_config"]
            # The group makes all tokens except the first, which comes from the prompt.
            expected = theorem_4_1(
                layers,
                engine.facts["split"],
                config["candidates"],
                hits / tried,
                new_tokens - 1,
            )
            predicted[engine.name] = layers / expected.latency
    return predicted
