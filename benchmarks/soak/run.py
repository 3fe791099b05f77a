# SPDX-License-Identifier: Apache-2.0
"""Send the same requests to a server of each method and of vLLM alone, and report differences.

    python -m vllm_ppd.benchmarks.soak.run                                # all; make soak does the same
    python -m vllm_ppd.benchmarks.soak.run --only cp --requests 300       # vLLM alone, and one method

Two servers run side by side, a core each; the worker group has both cores. Answers are written to FOLDER as
they arrive; after a stop the same command, at the same commit, continues with the unfinished servers. Memory
is compared over the second half of the requests.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.contenders import BASE, Contender
from vllm_ppd.benchmarks.harness.results import Row, write_rows
from vllm_ppd.benchmarks.serve.server import Server
from vllm_ppd.benchmarks.soak import checks, client
from vllm_ppd.benchmarks.soak.workload import CHUNK, Request, Workload
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.in_words import table
from vllm_ppd.heads.locking import writing_folder
from vllm_ppd.heads.training.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
MODEL, HEADS = str(ROOT / "demo" / "model"), ROOT / "demo" / "heads"
REQUESTS, GROUP_REQUESTS, CORES = 10_000, 1_000, 2
FEW_AT_ONCE = f"{BASE}, 3 at once"
# The KV cache holds fewer tokens than the running requests ask for, so that some are preempted.
ARGUMENTS = {
    "dtype": "float32", "max_model_len": 384, "max_num_seqs": 32, "max_num_batched_tokens": 4096, "block_size": 32,
    "num_gpu_blocks_override": 48, "kv_cache_memory_bytes": 1 << 26, "long_prefill_token_threshold": CHUNK,
    "generation_config": "vllm",
}  # fmt: skip


class Method(NamedTuple):
    """A contender, the most drafts of a request in a step, and how to send requests to it."""

    contender: Contender
    drafts: int = 0
    at_once: int = 48
    requests: int = REQUESTS
    cores: int = 1


def methods() -> list[Method]:
    """The control first.

    Drafting is not adaptive with 48 concurrent requests, since drafts do not pay then on one core and would be off.
    Lookup, which is adaptive, and the group have few concurrent requests, so that drafts pay and the group's stages
    often see a batch without prompts. The memory of the lookup is compared with that of a
    second control with as few.
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
        Method(Contender(BASE)), Method(Contender(FEW_AT_ONCE, None, few), at_once=3),
        heads("early", 2, exit_layer=5), heads("cp", 3), heads("dynamo", 2),
        Method(lookup, 3, at_once=3), Method(group, 3, at_once=5, requests=GROUP_REQUESTS, cores=CORES),
    ]  # fmt: skip


class Soak:
    """The files of the servers' answers.

    Args:
        folder: of the files, whose names contain the commit.
        requests: of each server at most.
    """

    def __init__(self, folder: Path, requests: int) -> None:
        self.folder, self.requests = folder, requests
        self.workload = Workload(MODEL)
        self.commit = str(provenance()["git"])[:7]

    def file_of(self, method: Method) -> Path:
        return self.folder / f"{method.contender.name.replace(' + ', '-')}-{self.commit}.jsonl"

    def records(self, method: Method) -> checks.Records | None:
        """The records of a method's server; None if it has not answered everything."""
        records = checks.read(self.file_of(method))
        whole = bool(records.end) and len(records.answers) == min(method.requests, self.requests)
        return records if whole else None

    async def ask(self, methods: list[Method]) -> None:
        """Start the servers of these methods, send the requests, and end the servers.

        Raises:
            BenchError: if a server does not start, or dies.
        """
        cores, before = cycle(sorted(os.sched_getaffinity(0))), client.shared_memory()
        with ExitStack() as stack:
            servers = []
            for method in methods:
                binding = "|".join(str(next(cores)) for _ in range(method.cores))
                # As a user's server: without the huge pages that benchmarks of speed ask for, which round memory up.
                environment = {"VLLM_CPU_OMP_THREADS_BIND": binding, "GLIBC_TUNABLES": "", "THP_MEM_ALLOC_ENABLE": "0"}
                print(f"starting {method.contender.name} ...", flush=True)
                contender, log = replace(method.contender, environment=environment), self.file_of(method)
                servers.append(Server(contender, MODEL, ARGUMENTS, log.with_suffix(".log")))
                stack.callback(servers[-1].close)
            asking = []
            for row, (server, method) in enumerate(zip(servers, methods, strict=True)):
                requests = [self.workload.request(index) for index in range(min(method.requests, self.requests))]
                asking.append(client.ask(server, requests, method.at_once, self.file_of(method), row))
            await asyncio.gather(*asking)
            for server, method in zip(servers, methods, strict=True):
                client.end(server, before, self.file_of(method))

    def report(self, out: Path) -> bool:
        """Print the rows of complete servers, and write them once all are; returns whether there is no fault."""
        everyone = methods()
        records = {method.contender.name: self.records(method) for method in everyone}
        rows: list[Row] = []
        faults: dict[str, list[str]] = {}
        control = records[BASE]
        drafting = next((records[m.contender.name] for m in everyone if m.drafts and records[m.contender.name]), None)
        for method in everyone:
            name = method.contender.name
            mine = records[name]
            if mine is not None and control is not None:
                alike = records[FEW_AT_ONCE] if method.at_once == everyone[1].at_once else control
                row, faults[name] = row_of(method, mine, control, alike, drafting, self.workload.request)
                rows.append(row)
        print(table(list(rows[0]), [list(row.values()) for row in rows]))
        for name, lines in faults.items():
            print(*(f"{name}: {fault}" for fault in lines), sep="\n", end="\n" * bool(lines))
        if len(rows) == len(everyone):
            configs = [method.contender.speculative_config for method in everyone]
            write_rows(out, "soak", rows, configs, model="benchmarks/demo/model", engine=ARGUMENTS, faults=faults)
            print(f"wrote {out}")
        return not any(faults.values())


def row_of(
    method: Method,
    mine: checks.Records,
    control: checks.Records,
    alike: checks.Records | None,
    drafting: checks.Records | None,
    request: Callable[[int], Request],
) -> tuple[Row, list[str]]:
    """A server's row of the report, and its faults.

    Args:
        method: of the server.
        mine: what it answered.
        control: what vLLM alone did.
        alike: the control with the same concurrency.
        drafting: the first server that drafts, for seeds: on a CPU vLLM alone has another runner and random numbers.
        request: by index.
    """
    asked = [request(index) for index in sorted(mine.answers)]
    greedy = checks.compare(((each.index,) * 2 for each in asked if each.greedy), mine.answers, control.answers)
    theirs = drafting.answers if drafting is not None and method.drafts else {}
    seeded = checks.compare(((each.index,) * 2 for each in asked if each.seeded), mine.answers, theirs)
    repeats = checks.compare(((each.index, each.repeats) for each in asked), mine.answers, mine.answers)
    grown = checks.growth(mine)
    drafted, accepted, preempted = map(mine.total, (checks.DRAFTED, checks.ACCEPTED, checks.PREEMPTIONS))
    faults = [f"request {index}: {answer['error']}" for index, answer in mine.answers.items() if "error" in answer]
    faults += [*checks.counter_faults(mine, request, method.drafts), *checks.end_faults(mine.end)]
    for index in greedy.unlike:
        where = checks.parting(MODEL, request(index), mine.answers[index], control.answers[index])
        faults.append(f"request {index}, greedy: {where}")
    faults += [f"request {index}, seeded, differs from another server's" for index in seeded.unlike]
    faults += [f"request {index} differs from {request(index).repeats}, which it repeats" for index in repeats.unlike]
    if alike is not None and len(mine.answers) == len(alike.answers):
        faults += checks.memory_faults(grown, checks.growth(alike))
    looks_up = "prompt_lookup_min" in (method.contender.speculative_config or {})
    happened = {
        "no request was preempted": preempted > 0,
        "no draft was accepted": accepted > 0 or not method.drafts,
        "no draft was looked up": not looks_up or mine.total("ppd:lookup_steps_total") > 0,
    }
    faults += [fault for fault, holds in happened.items() if not holds]
    return {
        "server": method.contender.name, "requests": len(mine.answers),
        "hung up": sum(answer["hung_up"] for answer in mine.answers.values()), "preemptions": preempted,
        "drafted": drafted, "accepted": accepted, "greedy unlike vLLM": str(greedy), "seeds not repeated": str(repeats),
        "seeded unlike another's": str(seeded), "MiB": mine.end["memory"] // checks.MIB,
        "grown": grown.mib if grown else "", "spread": grown.spread if grown else "", "faults": len(faults),
    }, faults  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [method.contender.name for method in methods()]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="besides vLLM alone (default: all)")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="to each server (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("build/soak"), help="for answers (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/soak/soak.json"), help="report (default: %(default)s)")
    options = parser.parse_args()
    with writing_folder(options.folder, "--folder"):
        soak = Soak(options.folder, options.requests)
        controls = (BASE, FEW_AT_ONCE) if "cp + lookup" in options.only else (BASE,)
        chosen = [method for method in methods() if method.contender.name in (*controls, *options.only)]
        missing = [method for method in chosen if soak.records(method) is None]
        alone = [method for method in missing if method.cores < CORES]
        groups = [alone[first : first + CORES] for first in range(0, len(alone), CORES)]
        for group in [*groups, *([method] for method in missing if method.cores == CORES)]:
            asyncio.run(soak.ask(group))
        return int(not soak.report(options.out))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        sys.exit(130)
    except (BenchError, HeadsError) as error:
        sys.exit(f"error: {error}")
