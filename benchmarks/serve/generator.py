# SPDX-License-Identifier: Apache-2.0
"""A turn under load: vLLM's own `vllm bench serve` as a process, and the server's counters before and after."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.process import last_line
from vllm_ppd.benchmarks.harness.results import Turn
from vllm_ppd.benchmarks.serve.options import Load, ServeOptions
from vllm_ppd.benchmarks.serve.server import Server, end, start

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
}
TIMES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 95, 99)


def send(server: Server, dataset: list[str], load: Load, options: ServeOptions, seed: int, folder: Path) -> Turn:
    """Let the load generator send the requests, and wait for their answers.

    Args:
        server: who is to answer.
        dataset: the flags that name the requests.
        load: how they come.
        options: their number and temperature.
        seed: of the arrivals; the same for all contenders of a round.
        folder: for the generator's files.

    Returns:
        rate, concurrency: of the load; seconds, completed, failed, requests_per_second, tokens_per_second: of the turn;
        {ttft,tpot,itl,e2el}_ms: mean, median, 95th and 99th percentile as vLLM computes them;
        changes of the counters, None where the server has no such series; ours: changes of our own;
        and [requests] each: arrival, ttft, latency (seconds), prompt_tokens, output_tokens.

    Raises:
        BenchError: if the generator or the server ends, or no request is answered.
    """
    before = server.counters()
    report = _generate(server, dataset, load, options, seed, folder)
    after = server.counters()
    if not report["completed"]:
        error = next((text.strip().splitlines()[-1] for text in report["errors"] if text.strip()), "no reason given")
        raise BenchError(f"{server.name}: no request was answered ({error})")
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    done = [index for index, error in enumerate(report["errors"]) if not error]
    first = min(report["start_times"])
    return {
        "rate": load.rate, "concurrency": load.concurrency, "seconds": report["duration"],
        "completed": report["completed"], "failed": report["failed"],
        "requests_per_second": report["request_throughput"], "tokens_per_second": report["output_throughput"],
        **{f"{time}_ms": {"mean": report[f"mean_{time}_ms"]}
           | {f"p{rank}": report[f"p{rank}_{time}_ms"] for rank in PERCENTILES} for time in TIMES},
        **{short: int(change[name]) if name in change else None for short, name in COUNTERS.items()},
        "ours": {name[4:].removesuffix("_total"): value for name, value in change.items() if _ours(name) and value},
        "arrival": [round(report["start_times"][i] - first, 4) for i in done],
        "ttft": [round(report["ttfts"][i], 4) for i in done],
        "latency": [round(report["latencies"][i], 4) for i in done],
        "prompt_tokens": [report["input_lens"][i] for i in done],
        "output_tokens": [report["output_lens"][i] for i in done],
    }  # fmt: skip


def _ours(name: str) -> bool:
    return name.startswith("ppd:") and not name.endswith("_created")


def _generate(
    server: Server, dataset: list[str], load: Load, options: ServeOptions, seed: int, folder: Path
) -> dict[str, Any]:  # fmt: skip
    """What `vllm bench serve` saves of a run."""
    words = [
        "bench", "serve", "--base-url", f"http://127.0.0.1:{server.port}", "--model", server.model,
        "--tokenizer", server.tokenizer, *dataset, "--num-prompts", str(options.requests), "--seed", str(seed),
        "--temperature", str(options.temperature), "--ignore-eos", "--disable-tqdm",
        "--request-rate", "inf" if load.rate is None else str(load.rate),
        *([] if load.concurrency is None else ["--max-concurrency", str(load.concurrency)]),
        *(["--trust-remote-code"] if options.trust_remote_code else []),
        "--percentile-metrics", ",".join(TIMES), "--metric-percentiles", ",".join(map(str, PERCENTILES)),
        "--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "result.json",
    ]  # fmt: skip
    log = folder / "log"
    process = start(words, log)
    try:
        code = process.wait()
    finally:
        end(process, signal.SIGTERM)
    if code:
        server.check()
        raise BenchError(f"{server.name}: the load generator ended with code {code}: {last_line(log)}")
    report: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return report
