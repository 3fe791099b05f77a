# SPDX-License-Identifier: Apache-2.0
"""The client of a server: requests at once, hang-ups, samples of memory, and what the server leaves behind."""

import asyncio
import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import psutil
from tqdm import tqdm

from vllm_ppd.benchmarks.serve.server import Server
from vllm_ppd.benchmarks.soak.workload import Request

EVERY = 100  # answers between two samples of memory
LAST_TOKENS = 2  # generated after all answers
END_SECONDS = 60  # until all processes of a server that is told to end have done so
COUNTED = re.compile(r"(vllm|ppd):\w*(?<!_created)(?<!_bucket)$")
Record = dict[str, Any]


async def answer(session: aiohttp.ClientSession, request: Request) -> Record:
    """Send a request and read the answer, up to a hang-up; the result has `error` if something went wrong."""
    record: Record = {"index": request.index, "ids": [], "text": "", "finish": None, "hung_up": False}
    try:
        async with session.post("/v1/completions", json=request.body) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {await response.text()}")
            if not request.body["stream"]:
                _add(record, await response.json())
            chunks = 0
            while record["finish"] is None and chunks != request.hang_up:
                line = await response.content.readline()
                if not line:
                    raise ValueError("the stream ended before the answer")
                if line.startswith(b"data: {"):
                    _add(record, json.loads(line[6:]))
                    chunks += 1
            record["hung_up"] = record["finish"] is None
            if record["hung_up"]:
                response.close()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        record["error"] = repr(error)[:300]
    return record


def _add(record: Record, message: dict[str, Any]) -> None:
    if "error" in message:
        raise ValueError(message["error"])
    (choice,) = message["choices"]
    record["ids"] += choice["token_ids"] or []
    record["text"] += choice["text"]
    record["finish"] = choice["finish_reason"]


async def ask(server: Server, requests: list[Request], at_once: int, out: Path, row: int) -> None:
    """Send the requests; write each answer as it arrives, and a sample of memory after every hundredth.

    Args:
        server: that is asked.
        requests: to send.
        at_once: concurrent requests.
        out: file of the records.
        row: of the progress bar.
    """
    todo, bar = iter(requests), tqdm(total=len(requests), desc=server.name, position=row, mininterval=1)
    url, timeout = f"http://127.0.0.1:{server.port}", aiohttp.ClientTimeout(total=None, sock_read=300)
    with out.open("w", buffering=1) as file, bar:
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

            async def client() -> None:
                for request in todo:
                    record = await answer(session, request)
                    server.check()
                    _write(file, record)
                    bar.update()
                    if bar.n % EVERY == 0:
                        _write(file, {"answered": bar.n, "memory": memory(server)})

            await asyncio.gather(*(client() for _ in range(at_once)))


def end(server: Server, before: set[str], out: Path) -> None:
    """Read the counters of an idle server, end it, and record what it leaves behind.

    Args:
        server: which is idle.
        before: shared_memory() before it started.
        out: file of the records, to which memory, counters, the exit code, and the processes and names in shared_memory
            that are left are added.
    """
    server.complete("a", LAST_TOKENS, 0.0)  # a step after the last hang-up, which the gauges wait for
    counters = {name: value for name, value in server.counters().items() if COUNTED.match(name)}
    record: Record = {"memory": memory(server), "counters": counters}
    family = _family(server)
    server.process.terminate()
    _, alive = psutil.wait_procs(family, END_SECONDS)
    record |= {"code": server.process.wait(), "processes": [f"{process.pid} {process.name()}" for process in alive]}
    server.close()
    record["shared_memory"] = sorted(shared_memory() - before)
    with out.open("a") as file:
        _write(file, record)


def memory(server: Server) -> int:
    """Private bytes of the engine core and its workers, without shared pages."""
    return sum(process.memory_full_info().uss for process in _family(server)[1:])


def _write(file: TextIO, record: Record) -> None:
    file.write(json.dumps(record) + "\n")


def shared_memory() -> set[str]:
    """Names in /dev/shm that no living process maps.

    Left out are the marks of Intel's OpenMP runtime, a KiB each: vLLM's processes end without it, with drafts or not.
    """
    held: set[int] = set()  # by inode: a semaphore is mapped by the name that it had before
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            held |= {int(line.split()[4]) for line in path.read_text().splitlines() if "/dev/shm/" in line}
    free = {entry.name for entry in os.scandir("/dev/shm") if entry.inode() not in held}
    return {name for name in free if not name.startswith("__KMP_REGISTERED_LIB_")}


def _family(server: Server) -> list[psutil.Process]:
    leader = psutil.Process(server.process.pid)
    return [leader, *leader.children(recursive=True)]
