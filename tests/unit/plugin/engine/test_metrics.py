# SPDX-License-Identifier: Apache-2.0
"""Our counters on the way of vLLM's statistics: worker, scheduler, serialisation, front
end, several of these.
"""

import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_ppd.vllm_plugins.config.options import CONFIG_KEY, parse_options
from vllm_ppd.vllm_plugins.config.resolve import resolve
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.engine.metrics import ATTRIBUTE, COUNTERS, Counters, totals
from vllm_ppd.vllm_plugins.engine.scheduler import CountingScheduler
from vllm_ppd.vllm_plugins.patches import statistics

IN_A_PROCESS = """
import sys
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from vllm_ppd.vllm_plugins.engine.metrics import Published
published = Published("model", [0, 1], sys.argv[1] == "group")
published.observe({"deferred_steps": 2.0}, 0)
published.observe({"deferred_steps": 5.0}, 1)
registry = CollectorRegistry() if sys.argv[2:] else REGISTRY
if sys.argv[2:]:
    MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def output(worker: Counters) -> ModelRunnerOutput:
    """A step's output with what a worker counted."""
    made = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    worker.attach(made)
    return made


def value(name: str, **labels: str) -> float:
    return (
        REGISTRY.get_sample_value(f"ppd:{name}_total", {"model_name": "test", **labels})
        or 0.0
    )


class Counting(CountingScheduler):
    """Our scheduler, of which vLLM's part makes empty statistics of a step."""

    def __init__(self, log_stats: bool = True) -> None:
        self.log_stats = log_stats
        self._pending = Counter()

    def step(self, output: ModelRunnerOutput) -> SchedulerStats | None:
        """The statistics of a step with this output."""
        with (
            patch.object(Scheduler, "update_from_output"),
            patch.object(Scheduler, "make_stats") as stock,
        ):
            stock.return_value = SchedulerStats() if self.log_stats else None
            self.update_from_output(SchedulerOutput.make_empty(), output)
            return self.make_stats()


class Manager:
    """vLLM's StatLoggerManager, its own loggers a list of what they read."""

    def __init__(self, config: DraftingConfig | None = None) -> None:
        self.engine_indexes = [0, 1]
        self.seen = []
        vllm_config = VllmConfig()
        vllm_config.additional_config = (
            {} if config is None else {CONFIG_KEY: config.model_dump_json()}
        )
        vllm_config.model_config = SimpleNamespace(served_model_name="test")  # type: ignore[assignment]
        statistics.make_loggers(lambda self, vllm_config: None, self, vllm_config)

    def record(
        self, stats: SchedulerStats | None, engine_idx: int | None = None
    ) -> None:
        def stock(
            self: Manager, scheduler_stats: Any, *, engine_idx: int | None
        ) -> None:
            self.seen.append(
                (scheduler_stats and scheduler_stats.kv_connector_stats, engine_idx)
            )

        statistics.record(stock, self, stats, engine_idx=engine_idx)


def told(stats: SchedulerStats | None) -> SchedulerStats | None:
    """What the front end makes of it, in another process."""
    buffers = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    return MsgpackDecoder(EngineCoreOutputs).decode(buffers).scheduler_stats


@pytest.fixture
def manager() -> Manager:
    return Manager(resolve(parse_options({}), 6, stages=2))


def test_counts_arrive_once_where_vllms_do(manager: Manager) -> None:
    amounts = {"deferred_steps": 2, "drafting_seconds": 0.25, "group_hits": 4}
    worker = Counters()
    scheduler = Counting()
    before = (
        {name: value(name, engine="1") for name in amounts},
        totals()["deferred_steps"],
    )
    for name, amount in amounts.items():
        worker.add(name, amount)
    sent = pickle.loads(pickle.dumps(output(worker)))  # as from a worker's process
    for made in (sent, output(worker)):
        manager.record(told(scheduler.step(made)), engine_idx=1)
    assert {
        name: value(name, engine="1") - before[0][name] for name in amounts
    } == amounts
    assert totals()["deferred_steps"] - before[1] == 2
    assert manager.seen == [(None, 1), (None, 1)], (
        "vLLM's loggers must not find our key"
    )


def test_statistics_that_are_off_hold_nothing_back() -> None:
    worker = Counters()
    scheduler = Counting(log_stats=False)
    before = totals()["fallback_steps"]
    for _ in range(3):
        worker.add("fallback_steps")
        assert scheduler.step(output(worker)) is None
    assert totals()["fallback_steps"] - before == 3, (
        "benchmarks count without statistics"
    )
    assert not scheduler._pending


def test_stages_hand_their_counts_on() -> None:
    first = Counters()
    last = Counters()
    first.add("group_candidates", 6)
    taken = first.take()
    last.take_in(taken)
    last.add("group_last_stage_layers", 5)
    assert not first.take().any()
    assert last.values.sum() == 11
    assert getattr(output(last), ATTRIBUTE) == {
        "group_candidates": 6.0,
        "group_last_stage_layers": 5.0,
    }
    assert taken.dtype == np.float64


def scraped(group: str, *args: str, **environment: str) -> str:
    command = [sys.executable, "-c", IN_A_PROCESS, group, *args]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("group", ["group", "alone"])
def test_all_counters_are_there_from_the_start(group: str) -> None:
    """Those of a worker group where there is one."""
    names = set(re.findall(r"^ppd:(\w+)_total\{", scraped(group), re.MULTILINE))
    assert names == {
        name.partition("/")[0]
        for name in COUNTERS
        if group == "group" or not name.startswith("group_")
    }


def test_several_api_servers(tmp_path: Path) -> None:
    """Each is told of some steps; vLLM's /metrics adds the processes up, which it does
    by prometheus_client's files.
    """
    scraped("alone", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    text = scraped("alone", "all", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert 'ppd:deferred_steps_total{engine="0",model_name="model"} 4.0' in text
    assert 'ppd:deferred_steps_total{engine="1",model_name="model"} 10.0' in text
    assert 'ppd:fallback_steps_total{engine="0",model_name="model"} 0.0' in text
