# SPDX-License-Identifier: Apache-2.0
"""The worker: vLLM's own for the platform, with our model runner and step costs."""

from typing import Any

from vllm.platforms import current_platform

from vllm_ppd.vllm_plugins.draft_length.costs import CostTable
from vllm_ppd.vllm_plugins.engine.cpu import native
from vllm_ppd.vllm_plugins.engine.runner import DraftingRunnerMixin
from vllm_ppd.vllm_plugins.engine.step_costs import costs_of_engine
from vllm_ppd.vllm_plugins.engine.temporary import temporarily
from vllm_ppd.vllm_plugins.engine.verification import warm_up_top_p


class StepCostsMixin:
    """Mixed into vLLM's worker; measures the step costs by which the scheduler chooses
    the number of drafts.
    """

    model_runner: Any
    _weight_update_is_draft: bool  # vLLM's

    def finish_weight_update(self) -> None:
        super().finish_weight_update()  # type: ignore[misc]
        if not self._weight_update_is_draft:
            self.model_runner.refresh_copies()

    def compile_or_warm_up_model(self) -> Any:
        runner = self.model_runner
        if runner.device.type == "cuda":
            warm_up_top_p(
                runner.max_num_reqs * (1 + runner.num_speculative_steps),
                runner.vocab_size,
                runner.device,
            )
        return super().compile_or_warm_up_model()  # type: ignore[misc]

    def step_costs(self) -> CostTable | None:
        """Costs of steps with and without drafts; called by the scheduler's process, in
        every worker.
        """
        table = costs_of_engine(self.model_runner)
        lookup = self.model_runner.speculator.lookup
        if lookup is not None:
            lookup.forget()  # dummy requests
        return table


if current_platform.is_cpu():
    from vllm.v1.worker.cpu import model_runner as cpu_model_runner
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner as ModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    class CPUDraftingModelRunner(DraftingRunnerMixin, ModelRunner):
        """vLLM's CPU model runner V2 that drafts."""

    class DraftingWorker(StepCostsMixin, CPUWorker):
        """vLLM's CPU worker; it takes its runner class from a module global, which is
        ours for that moment.
        """

        runner_class: type = CPUDraftingModelRunner

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            native.register()
            with native.accepted():
                super().__init__(*args, **kwargs)

        def init_device(self) -> None:
            with temporarily(cpu_model_runner, CPUModelRunner=self.runner_class):
                super().init_device()

else:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as ModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    class GPUDraftingModelRunner(DraftingRunnerMixin, ModelRunner):
        """vLLM's GPU model runner V2 that drafts."""

    class DraftingWorker(StepCostsMixin, Worker):  # type: ignore[no-redef]
        """vLLM's GPU worker."""

        runner_class: type = GPUDraftingModelRunner

        def _make_model_runner(self) -> Any:
            return self.runner_class(self.vllm_config, self.device)
