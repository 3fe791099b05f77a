# SPDX-License-Identifier: Apache-2.0
"""Our counters on the way of vLLM's statistics: worker, scheduler, serialisation, front end, several of these."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_ppd.vllm_plugins.engine.metrics import COUNTERS, Counters, Published, totals
from vllm_ppd.vllm_plugins.engine.v1.step import with_counts
from vllm_ppd.vllm_plugins.patches import stats_path

IN_A_PROCESS = """
import sys
from vllm_ppd.vllm_plugins.engine.metrics import Published
published = Published("model", [0, 1], sys.argv[1] == "group")
published.observe({"deferred_steps": 2.0}, 0)
published.observe({"deferred_steps": 5.0}, 1)
if sys.argv[2:]:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
else:
    from prometheus_client import REGISTRY, generate_latest
    print(generate_latest(REGISTRY).decode())
"""


def output() -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=[], req_id_to_index={})


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"ppd:{name}_total", {"model_name": "test", **labels}) or 0.0


class Scheduler:
    """What the wrapped methods call."""

    def __init__(self, log_stats: bool) -> None:
        self.log_stats = log_stats

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> SchedulerStats | None:
        return self.make_stats()

    def make_stats(self) -> SchedulerStats | None:
        return SchedulerStats() if self.log_stats else None


class Manager:
    """vLLM's StatLoggerManager, its own loggers a list of what they read."""

    def __init__(self, vllm_config: Any) -> None:
        self.engine_indexes, self.seen = [0, 1], []  # type: ignore[var-annotated]

    def record(self, scheduler_stats: Any, iteration_stats: Any, *, engine_idx: int | None = None) -> None:
        self.seen.append((scheduler_stats and scheduler_stats.kv_connector_stats, engine_idx))


for name in ("update_from_output", "make_stats"):
    setattr(Scheduler, name, getattr(stats_path, name)(getattr(Scheduler, name)))
Manager.record = stats_path.record(Manager.record)  # type: ignore[method-assign]


def told(stats: SchedulerStats | None) -> SchedulerStats | None:
    """What the front end makes of it, in another process."""
    buffers = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    return MsgpackDecoder(EngineCoreOutputs).decode(buffers).scheduler_stats


@pytest.fixture
def manager() -> Manager:
    manager = Manager(None)
    setattr(manager, stats_path._PUBLISHED, Published("test", [0, 1], group=True))
    return manager


def test_counts_arrive_once_where_vllms_do(manager: Manager) -> None:
    worker, scheduler = Counters(), Scheduler(log_stats=True)
    before = value("deferred_steps", engine="1"), value("drafting_seconds", engine="1"), totals()["deferred_steps"]
    hits = value("group_hits", engine="1")
    worker.add("deferred_steps", 2)
    worker.add("drafting_seconds", 0.25)
    worker.add("group_hits", 4)
    sent = pickle.loads(pickle.dumps(with_counts(output(), worker)))  # as from a worker's process
    manager.record(told(scheduler.update_from_output(None, sent)), None, engine_idx=1)
    manager.record(told(scheduler.update_from_output(None, with_counts(output(), worker))), None, engine_idx=1)
    assert value("deferred_steps", engine="1") - before[0] == 2
    assert value("drafting_seconds", engine="1") - before[1] == 0.25
    assert value("group_hits", engine="1") - hits == 4
    assert totals()["deferred_steps"] - before[2] == 2
    assert manager.seen == [(None, 1), (None, 1)], "vLLM's loggers must not find our key"


def test_steps_without_an_output_of_their_own_keep_their_counts() -> None:
    """vLLM shares one empty output: what is counted goes with the next one."""
    worker = Counters()
    worker.add("fallback_steps")
    assert not hasattr(with_counts(EMPTY_MODEL_RUNNER_OUTPUT, worker), "vllm_ppd_counts")
    assert with_counts(output(), worker).vllm_ppd_counts == {"fallback_steps": 1.0}
    assert not hasattr(with_counts(output(), worker), "vllm_ppd_counts")


def test_statistics_that_are_off_hold_nothing_back() -> None:
    worker, scheduler, before = Counters(), Scheduler(log_stats=False), totals()["fallback_steps"]
    for _ in range(3):
        worker.add("fallback_steps")
        assert scheduler.update_from_output(None, with_counts(output(), worker)) is None
    assert totals()["fallback_steps"] - before == 3, "benchmarks count without statistics"
    assert not getattr(scheduler, stats_path._PENDING)


def test_connectors_keep_their_own_statistics(manager: Manager) -> None:
    scheduler, worker = Scheduler(log_stats=True), Counters()
    stats = SchedulerStats(kv_connector_stats={"transfers": 3, stats_path.KEY: {"fallback_steps": 1.0}})
    manager.record(stats, None)
    manager.record(SchedulerStats(kv_connector_stats={"transfers": 4}), None, engine_idx=1)
    manager.record(None, None, engine_idx=1)
    assert manager.seen == [({"transfers": 3}, None), ({"transfers": 4}, 1), (None, 1)]
    assert scheduler.update_from_output(None, with_counts(output(), worker)).kv_connector_stats is None  # type: ignore[union-attr]


def test_stages_hand_their_counts_on() -> None:
    first, last = Counters(), Counters()
    first.add("group_candidates", 6)
    taken = first.take()
    last.take_in(taken)
    last.add("group_last_stage_seconds", 0.5)
    assert not first.take().any()
    assert last.values.sum() == 6.5
    assert with_counts(output(), last).vllm_ppd_counts == {"group_candidates": 6.0, "group_last_stage_seconds": 0.5}
    assert taken.dtype == np.float64


def scraped(group: str, *args: str, **environment: str) -> str:
    command = [sys.executable, "-c", IN_A_PROCESS, group, *args]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("group", ["group", "alone"])
def test_all_counters_are_there_from_the_start(group: str) -> None:
    """Those of a worker group where there is one."""
    names = set(re.findall(r"^ppd:(\w+)_total\{", scraped(group), re.MULTILINE))
    assert names == {name for name in COUNTERS if group == "group" or not name.startswith("group_")}


def test_several_api_servers(tmp_path: Path) -> None:
    """Each is told of some steps; vLLM's /metrics adds the processes up, which it does by prometheus_client's files."""
    scraped("alone", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    text = scraped("alone", "all", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert 'ppd:deferred_steps_total{engine="0",model_name="model"} 4.0' in text
    assert 'ppd:deferred_steps_total{engine="1",model_name="model"} 10.0' in text
    assert 'ppd:confidence_stops_total{engine="0",model_name="model"} 0.0' in text


def test_other_engines_have_none() -> None:
    """A front end of vLLM's own methods registers nothing."""
    wrapped = stats_path.stat_loggers(Manager.__init__)
    manager = Manager.__new__(Manager)
    wrapped(manager, SimpleNamespace(additional_config={}))
    assert not hasattr(manager, stats_path._PUBLISHED)
