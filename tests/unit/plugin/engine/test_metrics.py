# SPDX-License-Identifier: Apache-2.0
"""Our counters on the way of vLLM's statistics: worker, scheduler, serialization, front
end, several of these.
"""

import os
import pickle
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.options import CONFIG_KEY, parse_options
from vllm_ppd.vllm_plugins.config.resolve import resolve
from vllm_ppd.vllm_plugins.engine.metrics import COUNTERS, Counters
from vllm_ppd.vllm_plugins.engine.scheduler import CountingScheduler
from vllm_ppd.vllm_plugins.patches import running

# Prometheus's text from the last front end of several, which share a folder
FRONT_ENDS = """
import os
import sys
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from vllm_ppd.vllm_plugins.config.options import parse_options
from vllm_ppd.vllm_plugins.config.resolve import resolve
from vllm_ppd.vllm_plugins.engine.metrics import Published
config = resolve(parse_options({"method": sys.argv[1]}), 6)
for _ in range(2):
    if not (child := os.fork()):
        published = Published("model", [0, 1], config)
        published.observe({"deferred_steps": 2.0}, 0)
        published.observe({"deferred_steps": 5.0}, 1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def output(worker: Counters) -> ModelRunnerOutput:
    """A step's output with what a worker counted, as from the worker's process."""
    made = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    worker.attach(made)
    return pickle.loads(pickle.dumps(made))


def value(name: str) -> float:
    labels = {"model_name": "test", "engine": "1"}
    return REGISTRY.get_sample_value(f"ppd:{name}_total", labels) or 0.0


class Counting(CountingScheduler):
    """Our scheduler, of which vLLM's part makes empty statistics of a step."""

    def __init__(self, log_stats: bool) -> None:
        self.log_stats = log_stats
        self._pending = defaultdict(float)

    def step(self, output: ModelRunnerOutput) -> SchedulerStats | None:
        """The statistics of a step with this output."""
        with (
            patch.object(Scheduler, "update_from_output"),
            patch.object(Scheduler, "make_stats") as stock,
        ):
            stock.return_value = SchedulerStats() if self.log_stats else None
            self.update_from_output(SchedulerOutput.make_empty(), output)
            return self.make_stats()


def sent(stats: SchedulerStats | None) -> Any:
    """The statistics in another process."""
    buffers = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    return MsgpackDecoder(EngineCoreOutputs).decode(buffers).scheduler_stats


def test_counts_arrive_once_where_vllms_do() -> None:
    """In Prometheus, and vLLM's own loggers find no key of ours."""
    vllm_config = VllmConfig()
    ours = resolve(parse_options({"method": "group"}), 6).model_dump_json()
    vllm_config.additional_config = {CONFIG_KEY: ours}
    vllm_config.model_config = SimpleNamespace(served_model_name="test")  # type: ignore[assignment]
    manager = SimpleNamespace(engine_indexes=[0, 1])
    running.make_loggers(lambda *_: None, manager, vllm_config)
    amounts = {"deferred_steps": 2, "drafting_seconds": 0.25, "group_hits": 4}
    worker = Counters()
    for name, amount in amounts.items():
        worker.add(name, amount)
    before = {name: value(name) for name in amounts}
    scheduler = Counting(log_stats=True)
    for made in (output(worker), output(worker)):
        stats = sent(scheduler.step(made))
        running.record(
            lambda *_, **__: None,
            manager,
            stats,
            engine_idx=1,
        )
        assert stats.kv_connector_stats is None
    assert {name: value(name) - before[name] for name in amounts} == amounts


def test_statistics_that_are_off_hold_nothing_back() -> None:
    worker = Counters()
    scheduler = Counting(log_stats=False)
    for _ in range(3):
        worker.add("fallback_steps")
        assert scheduler.step(output(worker)) is None
    assert not scheduler._pending


@pytest.mark.parametrize("method", ["group", "cp"])
def test_several_api_servers(tmp_path: Path, method: str) -> None:
    """Each gets some steps; vLLM's /metrics adds the processes up. All counters are
    there from the start, those of a worker group where there is one.
    """
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", FRONT_ENDS, method],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    names = set(re.findall(r"^ppd:(\w+)_total\{", run.stdout, re.MULTILINE))
    assert names == {
        name.partition("/")[0]
        for name in COUNTERS
        if method == "group" or not name.startswith("group_")
    }
    for engine, steps in ((0, 4.0), (1, 10.0)):
        labels = f'{{engine="{engine}",model_name="model"}}'
        assert f"ppd:deferred_steps_total{labels} {steps}" in run.stdout
        info = (
            f'ppd_info{{engine="{engine}",heads="",method="{method}",'
            f'model_name="model",verify="true",version="{platform.version()}"}} 1.0'
        )
        assert run.stdout.count(info) == 1
