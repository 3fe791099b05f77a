# SPDX-License-Identifier: Apache-2.0
"""How many replicas keep a latency target under a request rate, by a seeded simulation of queues."""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import NamedTuple

import numpy as np

from vllm_ppd.heads.planning.predict import Way

PERCENTILE = 95
REQUESTS = 4000  # simulated; the first tenth warms up
MOST_REPLICAS = 4096


class Fleet(NamedTuple):
    """Replicas that decode in one way."""

    way: Way | None  # None: vLLM alone
    replicas: int | None  # None: no number of them keeps the target
    latency: float  # seconds, 95th percentile, with so many (None: where each request has one)
    lacks: str = ""  # why no number of them is enough, and what to change


class Load(NamedTuple):
    """Requests of exponentially distributed lengths that arrive at random."""

    rate: float  # requests a second, over all replicas
    tokens: float  # mean tokens that a request generates
    seed: int = 0


def speeds(way: Way, largest: int, drafting: bool) -> np.ndarray:
    """Tokens a second of one request in batches of 1, 2, ...: [largest]; drafts are made where they gain."""
    sizes = range(1, largest + 1)
    plain = np.array([1 / way.plain(size) for size in sizes])
    return np.maximum(plain, [way.length / way.seconds(size) for size in sizes]) if drafting else plain


def latencies(speed: np.ndarray, load: Load, replicas: int) -> np.ndarray:
    """Seconds from arrival to the last token, of requests that go to the replica with the fewest of them.

    Args:
        speed: [largest batch] tokens a second of each request of a batch, by its size.
        load: what arrives.
        replicas: how many serve.

    Returns:
        [requests] in order of arrival, those after the warm-up.
    """
    rng = np.random.default_rng(load.seed)
    arrival = np.cumsum(rng.exponential(1 / load.rate, REQUESTS))
    length = np.maximum(1.0, rng.exponential(load.tokens, REQUESTS))
    return served(speed, arrival, length, replicas)[REQUESTS // 10 :]


def served(speed: np.ndarray, arrival: np.ndarray, length: np.ndarray, replicas: int) -> np.ndarray:
    """Seconds from arrival to the last token, of given requests.

    Args:
        speed: [largest batch] tokens a second of each request of a batch, by its size.
        arrival: [requests] seconds, ascending.
        length: [requests] tokens.
        replicas: how many serve.

    Returns:
        [requests] in order of arrival.
    """
    requests = len(arrival)
    # All requests of a batch advance alike: one ends when its replica's tokens a request reach its mark.
    running: list[list[tuple[float, int]]] = [[] for _ in range(replicas)]
    waiting: list[deque[int]] = [deque() for _ in range(replicas)]
    held, tokens, since = np.zeros(replicas, dtype=np.int64), np.zeros(replicas), np.zeros(replicas)
    ends = np.full(replicas, np.inf)
    found = np.zeros(requests)

    def turn(replica: int, now: float) -> None:
        """Bring a replica up to date."""
        if running[replica]:
            tokens[replica] += (now - since[replica]) * speed[len(running[replica]) - 1]
        since[replica] = now

    def start(replica: int) -> None:
        """Let in what waits, and tell when the next request ends."""
        while waiting[replica] and len(running[replica]) < len(speed):
            request = waiting[replica].popleft()
            heapq.heappush(running[replica], (tokens[replica] + length[request], request))
        if not running[replica]:
            ends[replica] = np.inf
            return
        left = running[replica][0][0] - tokens[replica]
        ends[replica] = since[replica] + max(0.0, left) / speed[len(running[replica]) - 1]

    arrived = 0
    while arrived < requests or held.any():
        replica = int(np.argmin(ends))
        if arrived < requests and arrival[arrived] <= ends[replica]:
            replica = int(np.argmin(held))
            turn(replica, arrival[arrived])
            waiting[replica].append(arrived)
            held[replica] += 1
            arrived += 1
        else:
            now = float(ends[replica])
            turn(replica, now)
            _, request = heapq.heappop(running[replica])
            found[request] = now - arrival[request]
            held[replica] -= 1
        start(replica)
    return found


def fleet(way: Way, largest: int, load: Load, target: float, drafting: bool) -> Fleet:
    """The fewest replicas whose 95th percentile of latency is within the target seconds."""
    speed = speeds(way, largest, drafting)
    own = way if drafting else None

    def tail(replicas: int, load: Load = load) -> float:
        return float(np.percentile(latencies(speed, load, replicas), PERCENTILE))

    # A request that has a replica to itself is as fast as it gets.
    fastest = tail(1, load._replace(rate=1e-9))
    if fastest > target:
        alone = f"95 % of the requests take up to {fastest:.3g} s where each has a replica to itself"
        return Fleet(own, None, fastest, f"{alone}; give a longer --latency, fewer --new-tokens or another machine")
    # The simulated requests are too few to fill replicas that only fall behind in the long run.
    enough = math.ceil(load.rate * load.tokens / (speed * np.arange(1, largest + 1)).max())
    too_few = enough - 1
    while enough <= MOST_REPLICAS and (reached := tail(enough)) > target:
        too_few, enough = enough, 2 * enough
    if enough > MOST_REPLICAS:
        lacks = f"the rate takes more than {too_few:,} replicas, and up to {MOST_REPLICAS:,} are considered"
        return Fleet(own, None, fastest, f"{lacks}; give a lower --rate")
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        seconds = tail(middle)
        if seconds <= target:
            enough, reached = middle, seconds
        else:
            too_few = middle
    return Fleet(own, enough, reached)
