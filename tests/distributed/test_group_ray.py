# SPDX-License-Identifier: Apache-2.0
"""The worker group under vLLM's Ray executor: its two stages are actors."""

from collections.abc import Iterator

import pytest
import ray
from cases import CASES
from conftest import Factory, counting, end_workers, start_engine

pytestmark = [pytest.mark.engine, pytest.mark.ranks, pytest.mark.full]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray of this machine with two devices; vLLM's CPU backend has no name for Ray's,
    so it borrows that of GPUs.
    """
    from vllm.platforms.cpu import CpuPlatform

    def name_devices() -> None:  # in the workers; a nested function travels by value
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.ray_device_key = "GPU"

    monkeypatch.setattr(CpuPlatform, "ray_device_key", "GPU")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"worker_process_setup_hook": name_devices},
    )
    yield
    ray.shutdown()


def test_same_tokens(engine: Factory, tiny_model: Factory, cluster: None) -> None:
    expected = {
        case: CASES[case](engine())
        for case in ("batch_1", "batch_16", "structured_output")
    }
    llm = start_engine(
        tiny_model(),
        {
            "method": "ppd",
            "candidates": 3,
            "exit_layer": 4,
            "num_speculative_tokens": 5,
        },
        pipeline_parallel_size=2,
        distributed_executor_backend="ray",
    )
    try:
        assert (
            type(llm.llm_engine.engine_core.engine_core.model_executor).__name__
            == "RayExecutorV2"
        )
        with counting(llm) as seen:
            assert {case: CASES[case](llm) for case in expected} == expected
        assert seen["accepted"] > 0
        # They come with the output, from wherever the worker is
        assert seen["group_hits"] > 0
    finally:
        end_workers(llm)
