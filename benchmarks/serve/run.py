# SPDX-License-Identifier: Apache-2.0
"""`ppd bench serve`: servers in turns, under requests sent by vLLM's own `vllm bench serve`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.contenders import Contender, contenders
from vllm_ppd.benchmarks.harness.process import last_line
from vllm_ppd.benchmarks.harness.prompts import load_tokenizer, read_prompts
from vllm_ppd.benchmarks.harness.results import Results, Turn
from vllm_ppd.benchmarks.harness.session import Session
from vllm_ppd.benchmarks.serve.options import SHORTEST, Load, ServeOptions
from vllm_ppd.benchmarks.serve.server import Server, end, start
from vllm_ppd.benchmarks.serve.table import COUNTERS, TIMES, table
from vllm_ppd.heads.data.special_tokens import SpecialTokens

WARM_UP = ("Once upon a time", "def main():", "The capital of France is")
PERCENTILES = (50, 95, 99)


def run(options: ServeOptions) -> str:
    """Measure every contender's server under every load, and write each turn to options.out; returns the table.

    Raises:
        BenchError, HeadsError, TrainingError: on input that does not fit, or if the base does not start.
        Stopped: on Ctrl-C.
    """
    everyone = contenders(options)
    workload = Workload(options)
    results = Results(options, everyone)
    _Serving(options, results, workload).measure(everyone)
    return table(results)


class _Serving(Session[Server, Load]):
    """Servers under a load."""

    options: ServeOptions

    def __init__(self, options: ServeOptions, results: Results, workload: Workload) -> None:
        super().__init__(options, dict.fromkeys(options.loads, results))
        self.workload = workload
        self.run = len(results.earlier)  # a further run draws further requests

    def start(self, contender: Contender, log: Path) -> Server:
        return Server(contender, self.options.model, self.options.engine_arguments, log)

    def warm_up(self, running: Server, load: Load) -> None:
        """Send a few single requests after a server has started."""
        if load == next(iter(self.loads)):
            for prompt in WARM_UP:
                running.complete(prompt, self.options.new_tokens, self.options.temperature)

    def turn(self, running: Server, load: Load, number: int) -> Turn:
        with TemporaryDirectory(prefix="ppd-load-") as name:
            dataset = self.workload.write(Path(name), self.run, list(self.loads).index(load), number)
            return send(running, dataset, load, self.options, number, Path(name))


class Workload:
    """Prompts from the data in an order drawn with the seed, and lengths of answers.

    Attributes:
        prompts: texts, without the special tokens at the beginning, which the server's tokenizer adds.
    """

    def __init__(self, options: ServeOptions) -> None:
        """Read the data, unless vLLM reads it.

        Raises:
            BenchError, TrainingError: if a file is missing or malformed, or no prompt fits half of the context.
        """
        self.options = options
        self.prompts: list[str] = []
        if options.dataset is None:
            trust = options.trust_remote_code
            tokenizer = load_tokenizer(options.tokenizer, trust)
            added = SpecialTokens.of(tokenizer)
            prompts = read_prompts(options.data, options.tokenizer, options.context // 2, None, trust)
            self.prompts = [tokenizer.decode(added.bare(ids)) for ids in prompts]

    def write(self, folder: Path, *seed: int) -> list[str]:
        """The flags of `vllm bench serve` that name the requests of a turn; the same seed gives the same requests.

        Args:
            folder: where a file of them is written.
            seed: of the turn; a prompt comes again after all others.
        """
        options = self.options
        if options.dataset is not None:
            return ["--dataset-name", options.dataset, "--dataset-path", *options.data, "--output-len",
                    str(options.new_tokens)]  # fmt: skip
        rng = np.random.default_rng([options.seed, *seed])
        rounds = [rng.permutation(len(self.prompts)) for _ in range(-(-options.requests // len(self.prompts)))]
        drawn = options.new_tokens * np.exp(options.new_spread * rng.standard_normal(options.requests))
        lengths = np.clip(drawn.astype(int), SHORTEST, options.context // 2).tolist()
        path = folder / "requests.jsonl"
        with path.open("w") as file:
            for prompt, length in zip(np.concatenate(rounds)[: options.requests], lengths, strict=True):
                file.write(json.dumps({"prompt": self.prompts[prompt], "output_tokens": length}) + "\n")
        return ["--dataset-name", "custom", "--dataset-path", str(path), "--custom-output-len", "-1",
                "--skip-chat-template", "--disable-shuffle"]  # fmt: skip


def send(server: Server, dataset: list[str], load: Load, options: ServeOptions, seed: int, folder: Path) -> Turn:
    """Let the load generator send the requests and wait for the answers.

    Args:
        server: to ask.
        dataset: the flags that name the requests.
        load: how the requests arrive.
        options: for number and temperature.
        seed: of the arrivals; the same for all contenders of a round.
        folder: for the generator's files.

    Returns:
        rate, concurrency: of the load; seconds, completed, failed, requests_per_second, tokens_per_second: of the turn;
        {ttft,tpot,itl,e2el}_ms: mean, median, 95th and 99th percentile as vLLM computes them;
        changes of the counters, None where the server has no such series; ours: changes of our own;
        prompt_tokens, output_tokens: of each request.

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
    ours = {name: value for name, value in change.items() if name.startswith("ppd:") and not name.endswith("_created")}
    done = [index for index, error in enumerate(report["errors"]) if not error]
    return {
        "rate": load.rate, "concurrency": load.concurrency, "seconds": report["duration"],
        "completed": report["completed"], "failed": report["failed"],
        "requests_per_second": report["request_throughput"], "tokens_per_second": report["output_throughput"],
        **{f"{time}_ms": {"mean": report[f"mean_{time}_ms"]}
           | {f"p{rank}": report[f"p{rank}_{time}_ms"] for rank in PERCENTILES} for time in TIMES},
        **{short: int(change[name]) if name in change else None for short, name in COUNTERS.items()},
        "ours": {name[4:].removesuffix("_total"): value for name, value in ours.items() if value},
        "prompt_tokens": [report["input_lens"][i] for i in done],
        "output_tokens": [report["output_lens"][i] for i in done],
    }  # fmt: skip


def _generate(
    server: Server, dataset: list[str], load: Load, options: ServeOptions, seed: int, folder: Path
) -> dict[str, Any]:  # fmt: skip
    """Run `vllm bench serve` and return its saved result."""
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
