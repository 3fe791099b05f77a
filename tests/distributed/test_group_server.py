# SPDX-License-Identifier: Apache-2.0
"""A worker group in a real server: its line, its metrics, and its end when a stage dies."""

import contextlib
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from conftest import Factory
from server import Server

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

FLAGS = (
    "--speculative-model ppd --pipeline-parallel-size 2 --ppd-candidates 2 "
    "--max-num-seqs 8"
)


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """The files in shared memory that processes have mapped.

    A killed process cannot take back what OpenMP's runtime registered for it.
    """
    mapped: set[str] = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        mapped.update(re.findall(r"/dev/shm/\S+$", maps, flags=re.MULTILINE))
    return {Path(name) for name in mapped if "__KMP_REGISTERED_LIB_" not in name}


@pytest.mark.full
@pytest.mark.parametrize(
    "stage", ["Worker_PP0", "Worker_PP1"], ids=["first", "last"]
)
def test_a_stage_that_dies_ends_the_server(
    tiny_model: Factory, tmp_path: Path, stage: str
) -> None:
    """Killed in mid-decode: an error to the client, the end of every process, nothing
    left in shared memory.
    """
    server = Server(tiny_model(), tmp_path / "log", *FLAGS.split())
    answers: list[Any] = []

    def ask() -> None:
        try:
            answer = server.complete(prompt=[9, 4, 7], max_tokens=250)
            answers.append(answer.status_code)
        except httpx.TransportError as error:
            answers.append(error)

    try:
        line = "method group: 2 pipeline stages of 3 and 3 layers, 2 candidates"
        assert line in server.log.read_text()
        assert server.complete().json()["usage"]["completion_tokens"] == 24
        metrics = server.metrics()
        assert metrics["ppd:group_micro_steps_total"] == 23
        assert (
            metrics["ppd:group_hits_total"] + metrics["ppd:group_misses_total"]
            == 22
        )
        root = psutil.Process(server.process.pid)
        members = [root, *root.children(recursive=True)]
        (worker,) = [
            member
            for member in members
            if stage in " ".join([member.name(), *member.cmdline()])
        ]
        client = threading.Thread(target=ask)
        client.start()
        while server.metrics()["ppd:group_micro_steps_total"] < 25:
            time.sleep(0.02)
        held = shared_memory(members)
        assert held
        worker.kill()
        client.join(60)
        assert answers and answers[0] != 200, answers
        server.process.wait(60)
        deadline = time.monotonic() + 30
        while alive := [member for member in members if is_alive(member)]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.2)
        assert not [path for path in held if path.exists()]
    finally:
        server.stop()
