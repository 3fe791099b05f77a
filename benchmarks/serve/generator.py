# SPDX-License-Identifier: Apache-2.0
"""A turn under load: vLLM's own `vllm bench serve` as a process, and the server's counters before and after."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.process import last_line
from vllm_ppd.benchmarks.harness.results import Turn
from vllm_ppd.benchmarks.harness.with_parent import command
from vllm_ppd.benchmarks.serve.options import Load
from vllm_ppd.benchmarks.serve.server import VLLM, Server, end, environment
from vllm_ppd.benchmarks.serve.workload import Request, write_sharegpt

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
}
TIMES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 95, 99)


def send(server: Server, requests: list[Request], load: Load, temperature: float, seed: int) -> Turn:
    """Let the load generator send the requests, and wait for their answers.

    Args:
        server: who is to answer.
        requests: of the turn.
        load: how they come.
        temperature: 0 decodes greedily.
        seed: of the arrivals; the same for all contenders of a round.

    Returns:
        rate, concurrency: of the load; seconds, completed, failed, requests_per_second, tokens_per_second: of the turn;
        {ttft,tpot,itl,e2el}_ms: mean, median, 95th and 99th percentile as vLLM computes them;
        changes of the counters, None where the server has no such series; ours: changes of our own;
        and [requests] each: arrival, ttft, latency (seconds), prompt_tokens, output_tokens.

    Raises:
        BenchError: if the generator or the server ends, or no request is answered.
    """
    before = server.counters()
    told = _generate(server, requests, load, temperature, seed)
    after = server.counters()
    if not told["completed"]:
        error = next((text.strip().splitlines()[-1] for text in told["errors"] if text.strip()), "no reason given")
        raise BenchError(f"{server.name}: no request was answered ({error})")
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    counted = {short: int(change[name]) if name in change else None for short, name in COUNTERS.items()}
    done = [index for index, error in enumerate(told["errors"]) if not error]
    first = min(told["start_times"])
    return {
        "rate": load.rate, "concurrency": load.concurrency, "seconds": told["duration"],
        "completed": told["completed"], "failed": told["failed"],
        "requests_per_second": told["request_throughput"], "tokens_per_second": told["output_throughput"],
        **{f"{name}_ms": _times(told, name) for name in TIMES},
        **counted,
        "ours": {name[4:].removesuffix("_total"): value for name, value in change.items() if _ours(name) and value},
        "arrival": [round(told["start_times"][i] - first, 4) for i in done],
        "ttft": [round(told["ttfts"][i], 4) for i in done],
        "latency": [round(told["latencies"][i], 4) for i in done],
        "prompt_tokens": [told["input_lens"][i] for i in done],
        "output_tokens": [told["output_lens"][i] for i in done],
    }  # fmt: skip


def _times(told: dict[str, Any], name: str) -> dict[str, float]:
    found = {"mean": told[f"mean_{name}_ms"]}
    return found | {f"p{part}": told[f"p{part}_{name}_ms"] for part in PERCENTILES}


def _ours(name: str) -> bool:
    return name.startswith("ppd:") and not name.endswith("_created")


def _generate(server: Server, requests: list[Request], load: Load, temperature: float, seed: int) -> dict[str, Any]:
    """What `vllm bench serve` saves of a run."""
    with tempfile.TemporaryDirectory(prefix="ppd-load-") as name:
        folder = Path(name)
        write_sharegpt(requests, folder / "requests.json")
        words = [
            *VLLM, "bench", "serve", "--base-url", f"http://127.0.0.1:{server.port}", "--model", server.model,
            "--tokenizer", server.tokenizer,
            "--dataset-name", "sharegpt", "--dataset-path", str(folder / "requests.json"), "--disable-shuffle",
            "--num-prompts", str(len(requests)), "--seed", str(seed), "--temperature", str(temperature),
            "--ignore-eos", "--disable-tqdm", "--request-rate", "inf" if load.rate is None else str(load.rate),
            *([] if load.concurrency is None else ["--max-concurrency", str(load.concurrency)]),
            "--percentile-metrics", ",".join(TIMES), "--metric-percentiles", ",".join(map(str, PERCENTILES)),
            "--save-result", "--save-detailed", "--result-dir", name, "--result-filename", "result.json",
        ]  # fmt: skip
        log = folder / "log"
        with log.open("w") as said:
            process = subprocess.Popen(
                command(words), stdout=said, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
            )
        try:
            code = process.wait()
        finally:
            end(process, signal.SIGTERM)
        if code:
            server.check()
            raise BenchError(f"{server.name}: the load generator ended with code {code}: {last_line(log)}")
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return found
