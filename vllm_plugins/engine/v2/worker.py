# SPDX-License-Identifier: Apache-2.0
"""The worker of runner V2: vLLM's own for the platform, with our model runner."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from vllm_ppd.vllm_plugins.engine.v2.runner import DraftingRunnerMixin

if current_platform.is_cpu():
    from vllm.v1.worker.cpu import model_runner as cpu_model_runner
    from vllm.v1.worker.cpu_worker import CPUWorker

    class CPUDraftingModelRunner(DraftingRunnerMixin, cpu_model_runner.CPUModelRunner):
        """vLLM's CPU model runner V2 that drafts."""

    class DraftingWorker(CPUWorker):
        """vLLM's CPU worker; it takes its runner class from a module global, which is ours for that moment."""

        def init_device(self) -> None:
            stock = cpu_model_runner.CPUModelRunner
            cpu_model_runner.CPUModelRunner = CPUDraftingModelRunner
            try:
                super().init_device()
            finally:
                cpu_model_runner.CPUModelRunner = stock

else:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    class GPUDraftingModelRunner(DraftingRunnerMixin, GPUModelRunner):
        """vLLM's GPU model runner V2 that drafts."""

    class DraftingWorker(Worker):  # type: ignore[no-redef]
        """vLLM's GPU worker."""

        def _make_model_runner(self) -> Any:
            return GPUDraftingModelRunner(self.vllm_config, self.device)
