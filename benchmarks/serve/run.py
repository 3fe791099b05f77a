# SPDX-License-Identifier: Apache-2.0
"""`ppd bench serve`: which server is under which load when."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_ppd.benchmarks.harness.contenders import Contender, contenders
from vllm_ppd.benchmarks.harness.results import Results, Turn
from vllm_ppd.benchmarks.harness.session import Session
from vllm_ppd.benchmarks.serve.generator import send
from vllm_ppd.benchmarks.serve.options import Load, ServeOptions
from vllm_ppd.benchmarks.serve.server import Server
from vllm_ppd.benchmarks.serve.table import table
from vllm_ppd.benchmarks.serve.workload import Workload

WARM_UP = ("Once upon a time", "def main():", "The capital of France is")


def run(options: ServeOptions) -> str:
    """Measure every contender's server under every load, and write each turn to options.out; the table.

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
        """A few requests by themselves, once a server has started."""
        if load == next(iter(self.loads)):
            for prompt in WARM_UP:
                running.complete(prompt, self.options.new_tokens, self.options.temperature)

    def turn(self, running: Server, load: Load, number: int) -> Turn:
        with TemporaryDirectory(prefix="ppd-load-") as name:
            dataset = self.workload.write(Path(name), self.run, list(self.loads).index(load), number)
            return send(running, dataset, load, self.options, number, Path(name))
