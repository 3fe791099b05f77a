# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests to real servers: answers equal those without drafts, and
nothing is left behind.

    # A server of each method after the other
    python tests/soak.py
    python tests/soak.py --only cp --requests 300

The KV cache is so small that requests are preempted, and clients hang up. The drafts of
every step are made, and steps are scheduled asynchronously, but for the group's. A greedy
answer is compared with that of vLLM alone, a seeded one with the same server's without
drafts: on a CPU vLLM alone has another runner, which draws other random numbers. Methods
that take LoRA adapters answer some requests with one. The server's memory may not grow after
the first thousand requests. Exit code 1: a fault.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import psutil
from adapters import RANK, make_adapter
from server import Server
from tqdm.contrib.concurrent import thread_map
from transformers import AutoTokenizer

from vllm_ppd.benchmarks.models.texts import split

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "benchmarks" / "demo"
HEADS = DEMO / "heads"
# Flags of each method's server.
METHODS = {
    "early": f"--speculative-model {HEADS}/early --ppd-exit-layer 5 --no-ppd-adaptive",
    "cp": f"--speculative-model {HEADS}/cp --no-ppd-adaptive",
    # `make soak` trains these
    "recurrent": (
        f"--speculative-model {ROOT}/build/soak/recurrent --no-ppd-adaptive"
    ),
    "lookup": "--speculative-model lookup --no-ppd-adaptive",
    "dynamo": (
        f"--speculative-model {HEADS}/dynamo --spec-tokens 2 --no-ppd-adaptive"
    ),
    "group": "--speculative-model group --ppd-exit-layer 6 --pipeline-parallel-size 2",
}
TAKE_ADAPTERS = ("cp", "recurrent", "lookup")
ADAPTER = "adapter"  # its name in requests
CACHE = "--num-gpu-blocks-override 24 --block-size 32 --max-num-seqs 16"
WARM = 1000  # requests, after which memory is flat
GROWTH = 1.03
AT_ONCE = 24
LONGEST_PROMPT = 128
LONGEST_ANSWER = 64
STRUCTURES: list[dict[str, Any]] = [
    {"regex": "[a-f]{3}[0-9]{1,6}"},
    {"choice": ["import os", "import sys", "return"]},
]
# Each of them is given to one request in twenty.
OPTIONS: dict[str, list[Any]] = {
    "repetition_penalty": [1.1, 1.4],
    "presence_penalty": [-0.5, 1.0],
    "logprobs": [0, 3],
    "bad_words": [["self"], ["("]],
    "stop": [["\n"], [")", "self."]],
    "stop_token_ids": [[9], [262, 273]],
    "vllm_xargs": [{"ppd_draft": False}],
    "structured_outputs": STRUCTURES,
}
IDLE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)


def request(index: int, text: list[int]) -> dict[str, Any]:
    """The body of a request, a function of its index; `hang_up` is the number of chunks
    after which the client does.
    """
    rng = random.Random(index)
    start = rng.randrange(len(text) - LONGEST_PROMPT)
    body: dict[str, Any] = {
        "prompt": text[start : start + rng.randrange(2, LONGEST_PROMPT)],
        "max_tokens": rng.randrange(1, LONGEST_ANSWER),
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.1:
        body["model"] = ADAPTER
    kind = rng.random()
    if kind < 0.15:
        return {
            **body,
            "ignore_eos": True,
            "stream": True,
            "hang_up": rng.randrange(6),
        }
    if kind < 0.5:
        body |= {
            "temperature": rng.choice([0.5, 0.8, 1.2]),
            "seed": index,
            "top_p": rng.choice([0.9, 1.0]),
        }
    body |= {
        name: rng.choice(values)
        for name, values in OPTIONS.items()
        if rng.random() < 0.05
    }
    if "structured_outputs" in body:
        # Nothing else may forbid the only token that the structure allows.
        body |= {"ignore_eos": False, "bad_words": [], "stop_token_ids": []}
    return body


def adapter_flags(folder: Path) -> str:
    """Flags of servers with a LoRA adapter."""
    path = make_adapter(folder / ADAPTER, DEMO / "model", scale=0.02)
    return (
        f" --enable-lora --max-lora-rank {RANK} --max-loras 2"
        f" --lora-modules {ADAPTER}={path}"
    )


def answer(server: Server, body: dict[str, Any]) -> list[int] | None:
    """The tokens of an answer; None if the client hung up.

    Raises:
        httpx.HTTPStatusError: if the server answered with an error.
    """
    body = {"model": server.model, **body}
    chunks = body.pop("hang_up", None)
    if chunks is None:
        response = server.complete(**body)
        response.raise_for_status()
        return list(response.json()["choices"][0]["token_ids"])
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        for _, _line in zip(range(chunks), stream.iter_lines(), strict=False):
            continue
    return None


def answers(
    server: Server, name: str, bodies: list[dict[str, Any]]
) -> list[list[int] | None]:
    """The answers to requests, AT_ONCE of them at a time."""
    return thread_map(
        partial(answer, server),
        bodies,
        max_workers=AT_ONCE,
        desc=name,
        mininterval=1,
    )


def memory(server: Server) -> int:
    """Bytes of a server's processes."""
    first = psutil.Process(server.process.pid)
    processes = [first, *first.children(recursive=True)]
    return sum(process.memory_info().rss for process in processes)


def soak(
    name: str,
    bodies: list[dict[str, Any]],
    expected: list[list[int] | None],
    folder: Path,
    adapters: str,
) -> int:
    """The number of faults of a method's server, which are printed; `adapters` are the
    flags of methods that take some.
    """
    flags = f"{METHODS[name]} {CACHE}"
    if name != "group":
        flags += " --async-scheduling"
    if name in TAKE_ADAPTERS:
        flags += adapters
    else:
        plain = ["model" not in body for body in bodies]
        bodies = [*compress(bodies, plain)]
        expected = [*compress(expected, plain)]
    server = Server(
        DEMO / "model",
        folder / f"{name}.log",
        *flags.split(),
    )
    try:
        outputs = answers(server, name, bodies[:WARM])
        warm = memory(server)
        outputs += answers(server, name, bodies[WARM:])
        growth = memory(server) / warm
        seeded = [index for index, body in enumerate(bodies) if "seed" in body]
        off = [
            {**bodies[index], "vllm_xargs": {"ppd_draft": False}}
            for index in seeded
        ]
        without_drafts = answers(server, f"{name}, drafts off", off)
        # The gauges wait for a step after the last hang-up
        server.complete(max_tokens=2)
        values = server.metrics()
    finally:
        server.stop()
    faults = [
        f"{gauge} is {values[gauge]:g} after the last answer"
        for gauge in IDLE
        if values[gauge]
    ]
    if growth > GROWTH:
        faults.append(f"{growth:.3f} of the memory after {WARM} requests")
    expected = [*expected]
    for index, tokens in zip(seeded, without_drafts, strict=True):
        expected[index] = tokens
    faults += [
        f"request {i} differs: {bodies[i]}"
        for i, ids in enumerate(outputs)
        if ids != expected[i]
    ]
    needed = [
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:num_preemptions_total",
    ]
    if name == "group":
        needed.append("ppd:group_hits_total")
    faults += [f"{counter} is 0" for counter in needed if not values[counter]]
    if server.process.returncode not in (0, -signal.SIGINT, -signal.SIGKILL):
        faults.append(f"exit code {server.process.returncode}")
    print(
        f"{name}: {len(bodies)} requests, {len(seeded)} seeded, {growth:.3f} of the "
        f"memory after {WARM}, {len(faults)} faults",
        flush=True,
    )
    for fault in faults:
        print(f"{name}: {fault}", flush=True)
    return len(faults)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="methods (default: all)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=3000,
        help="to each server (default: %(default)s)",
    )
    options = parser.parse_args()
    # vLLM binds the ranks of a group to a NUMA node each
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    text = AutoTokenizer.from_pretrained(DEMO / "model")(
        "\n".join(split()[1]), verbose=False
    )["input_ids"]
    bodies = [request(index, text) for index in range(options.requests)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapters = adapter_flags(folder)
        flags = CACHE + adapters
        alone = Server(
            DEMO / "model",
            folder / "alone.log",
            *flags.split(),
        )
        try:
            # vLLM's runner V1 ends at a seeded prompt in chunks
            unseeded = [{**body, "seed": None} for body in bodies]
            expected = answers(alone, "vLLM alone", unseeded)
        finally:
            alone.stop()
        faults = [
            soak(
                name,
                bodies,
                expected,
                folder,
                adapters,
            )
            for name in options.only
        ]
    return int(any(faults))


if __name__ == "__main__":
    sys.exit(main())
