# SPDX-License-Identifier: Apache-2.0
"""Ask every method's server the same ten thousand requests as vLLM's alone, and report what differs.

    python -m vllm_ppd.benchmarks.soak.run                                # all; make soak does the same
    python -m vllm_ppd.benchmarks.soak.run --only cp --requests 300       # vLLM alone, and one method

Two servers run side by side, a core each; the worker group has two cores for itself. Answers are kept in FOLDER as they
come. A stopped run keeps them; the same command, at the same commit, asks for what is missing. Memory is compared over
the second half of the requests, which one server must live through.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.contenders import BASE, Contender
from vllm_ppd.benchmarks.harness.results import Row, write_rows
from vllm_ppd.benchmarks.serve.server import Server
from vllm_ppd.benchmarks.soak import checks, client
from vllm_ppd.benchmarks.soak.workload import CHUNK, Request, Workload
from vllm_ppd.heads.calibration.tables import table
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.locking import writing_folder
from vllm_ppd.heads.training.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
MODEL, HEADS = str(ROOT / "demo" / "model"), ROOT / "demo" / "heads"
REQUESTS, GROUP_REQUESTS, CORES = 10_000, 1_000, 2
# The KV cache holds fewer tokens than the running requests ask for, so that some are preempted.
ARGUMENTS = {
    "dtype": "float32", "max_model_len": 384, "max_num_seqs": 32, "max_num_batched_tokens": 4096, "block_size": 32,
    "num_gpu_blocks_override": 48, "kv_cache_memory_bytes": 1 << 26, "long_prefill_token_threshold": CHUNK,
    "generation_config": "vllm",
}  # fmt: skip


class Method(NamedTuple):
    """A contender, the drafts that a request has in a step at most, and how it is asked."""

    contender: Contender
    drafts: int = 0
    at_once: int = 48
    requests: int = REQUESTS
    cores: int = 1


def methods() -> list[Method]:
    """The control first.

    Drafting is not adaptive at 48 requests at once, where drafts do not pay on one core and would be off nearly always.
    Lookup and the group are asked for a few at once: a step takes looked-up drafts only where each of its requests has
    one, and the group's stages draft for a batch without prompts.
    """

    def heads(kind: str, drafts: int, **options: Any) -> Method:
        config = {"model": str(HEADS / kind), "num_speculative_tokens": drafts, "adaptive": False, **options}
        return Method(Contender(kind, config), drafts)

    cp = {"model": str(HEADS / "cp"), "num_speculative_tokens": 3}
    early = {"model": str(HEADS / "early"), "num_speculative_tokens": 3}
    few = {"num_gpu_blocks_override": 13}
    lookup = Contender("cp + lookup", {**cp, "prompt_lookup_min": 3}, few)
    group = Contender("group", {**early, "candidates": 2}, {**few, "pipeline_parallel_size": 2, "max_num_seqs": 8})
    return [
        Method(Contender(BASE)), heads("early", 2, exit_layer=5), heads("cp", 3), heads("dynamo", 2),
        Method(lookup, 3, at_once=3), Method(group, 3, at_once=5, requests=GROUP_REQUESTS, cores=CORES),
    ]  # fmt: skip


@cache
def commit() -> str:
    return str(provenance()["git"])[:7]


def file_of(method: Method, options: argparse.Namespace) -> Path:
    """Where its records are: another commit's code is asked anew."""
    folder: Path = options.folder
    return folder / f"{method.contender.name.replace(' + ', '-')}-{commit()}.jsonl"


def kept(method: Method, options: argparse.Namespace) -> checks.Kept:
    return checks.read(file_of(method, options), min(method.requests, options.requests))


def ask_together(together: list[Method], options: argparse.Namespace, workload: Workload) -> None:
    """Start the servers of these methods, ask each for the answers that are missing, and end them.

    Raises:
        BenchError: if a server does not start, or dies.
    """
    cores = cycle(sorted(os.sched_getaffinity(0)))
    before = client.shared_memory()
    with ExitStack() as stack:
        servers = []
        for method in together:
            own = "|".join(str(next(cores)) for _ in range(method.cores))
            # As a user's server: without the huge pages that benchmarks of speed ask for, which round memory up.
            environment = {"VLLM_CPU_OMP_THREADS_BIND": own, "GLIBC_TUNABLES": "", "THP_MEM_ALLOC_ENABLE": "0"}
            print(f"starting {method.contender.name} ...", flush=True)
            contender = replace(method.contender, environment=environment)
            servers.append(Server(contender, MODEL, ARGUMENTS, file_of(method, options).with_suffix(".log")))
            stack.callback(servers[-1].close)
        asyncio.run(_ask_all(servers, together, options, workload))
        for server, method in zip(servers, together, strict=True):
            client.end(server, before, file_of(method, options))


async def _ask_all(
    servers: list[Server], together: list[Method], options: argparse.Namespace, workload: Workload
) -> None:
    asked = []
    for row, (server, method) in enumerate(zip(servers, together, strict=True)):
        answered, requests = kept(method, options).answers, min(method.requests, options.requests)
        missing = [workload.request(index) for index in range(requests) if index not in answered]
        asked.append(client.ask(server, missing, len(answered), method.at_once, file_of(method, options), row))
    await asyncio.gather(*asked)


def row_of(
    method: Method, mine: checks.Kept, control: checks.Kept, request: Callable[[int], Request]
) -> tuple[Row, list[str]]:
    """A server's line of the report, and its faults."""
    asked = [request(index) for index in sorted(mine.answers)]
    greedy = checks.compare(((each.index,) * 2 for each in asked if each.greedy), mine.answers, control.answers)
    seeded = checks.compare(((each.index,) * 2 for each in asked if each.seeded), mine.answers, control.answers)
    repeats = checks.compare(((each.index, each.repeats) for each in asked), mine.answers, mine.answers)
    grown, grown_alone = checks.growth(mine), checks.growth(control)
    drafted, accepted, preempted = map(mine.total, (checks.DRAFTED, checks.ACCEPTED, checks.PREEMPTIONS))
    faults = [f"request {index}: {one['error']}" for index, one in mine.answers.items() if "error" in one]
    faults += [*checks.counter_faults(mine, request, method.drafts), *checks.end_faults(mine.end)]
    for index in greedy.unlike:
        where = checks.parting(MODEL, request(index), mine.answers[index], control.answers[index])
        faults.append(f"request {index}, greedy: {where}")
    faults += [f"request {index}, seeded, differs from vLLM's" for index in seeded.unlike]
    faults += [f"request {index} differs from {request(index).repeats}, which it repeats" for index in repeats.unlike]
    if mine is not control and mine.requests == control.requests >= checks.FEWEST:
        faults += checks.memory_faults(grown, grown_alone)
    faults += [] if preempted else ["no request was preempted"]
    faults += [] if accepted or not method.drafts else ["no draft was accepted"]
    options = method.contender.speculative_config or {}
    if "prompt_lookup_min" in options and not mine.total("ppd:lookup_steps_total"):
        faults.append("no draft was looked up")
    return {
        "server": method.contender.name, "requests": mine.requests,
        "hung up": sum(one["hung_up"] for one in mine.answers.values()), "preemptions": preempted,
        "drafted": drafted, "accepted": accepted, "greedy unlike vLLM": f"{len(greedy.unlike)} of {greedy.pairs}",
        "seeds not repeated": f"{len(repeats.unlike)} of {repeats.pairs}",
        "seeded unlike vLLM": f"{len(seeded.unlike)} of {seeded.pairs}", "MiB": mine.end["memory"] // checks.MIB,
        "grown": grown.mib if grown else "", "spread": grown.spread if grown else "", "faults": len(faults),
    }, faults  # fmt: skip


def report(options: argparse.Namespace, workload: Workload) -> bool:
    """Print what those that are complete come to, and write it once all are; whether there is no fault."""
    everyone = [(method, kept(method, options)) for method in methods()]
    complete = [(method, mine) for method, mine in everyone if mine.complete]
    control = everyone[0][1]
    rows: list[Row] = []
    faults: dict[str, list[str]] = {}
    for method, mine in complete:
        row, faults[method.contender.name] = row_of(method, mine, control, workload.request)
        rows.append(row)
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    for name, own in faults.items():
        print(*(f"{name}: {fault}" for fault in own), sep="\n", end="\n" * bool(own))
    if len(complete) == len(everyone):
        write_rows(options.out, "soak", rows, model="benchmarks/demo/model", engine=ARGUMENTS, faults=faults)
        print(f"wrote {options.out}")
    return not any(faults.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [method.contender.name for method in methods()]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="beside vLLM alone (default: all)")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each server (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("build/soak"), help="of answers (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/soak/soak.json"), help="report (default: %(default)s)")
    options = parser.parse_args()
    with writing_folder(options.folder, "--folder"):
        workload = Workload(MODEL)
        chosen = [method for method in methods() if method.contender.name in (BASE, *options.only)]
        todo = [method for method in chosen if not kept(method, options).complete]
        alone = [method for method in todo if method.cores < CORES]
        pairs = [alone[first : first + CORES] for first in range(0, len(alone), CORES)]
        for together in [*pairs, *([method] for method in todo if method.cores == CORES)]:
            ask_together(together, options, workload)
        return int(not report(options, workload))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
    except (BenchError, HeadsError) as error:
        sys.exit(f"error: {error}")
