# SPDX-License-Identifier: Apache-2.0
"""The worker: vLLM's own for the platform, with our model runner; after warm-up it measures step costs."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.platforms import current_platform

from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.draft_length.controller import DraftLengthController
from vllm_ppd.vllm_plugins.draft_length.costs import MeasuredCosts, StepCosts
from vllm_ppd.vllm_plugins.draft_length.measure import counts_of
from vllm_ppd.vllm_plugins.drafting.prompt_lookup import ALL_KINDS
from vllm_ppd.vllm_plugins.engine.cpu.plain_weights import plain_weights
from vllm_ppd.vllm_plugins.engine.cpu.prefill_generators import PrefillGenerators
from vllm_ppd.vllm_plugins.engine.cpu.workarounds import mend_expand_kernel
from vllm_ppd.vllm_plugins.engine.dummy_batch import most_requests
from vllm_ppd.vllm_plugins.engine.graph_modes import without_full_graphs
from vllm_ppd.vllm_plugins.engine.predicted_gain import log_predicted_gain
from vllm_ppd.vllm_plugins.engine.step_costs import costs_of_engine
from vllm_ppd.vllm_plugins.engine.temporary import temporarily
from vllm_ppd.vllm_plugins.engine.v1.dummy_steps import STEPS, time_steps
from vllm_ppd.vllm_plugins.engine.v1.proposer import DraftingRunnerMixin, Proposer
from vllm_ppd.vllm_plugins.engine.weight_updates import UpdatedWorker


class WarmUpMixin(UpdatedWorker):
    """Mixed into vLLM's worker."""

    model_runner: Any

    def compile_or_warm_up_model(self) -> Any:
        times, drafter = super().compile_or_warm_up_model(), self.model_runner.drafter  # type: ignore[misc]
        costs = set_draft_length(drafter) if drafter.config.adaptive else None
        log_predicted_gain(drafter.config, drafter.vllm_config, costs)
        return times


def set_draft_length(drafter: Proposer) -> MeasuredCosts | None:
    """Let the number of drafts follow step costs from now on; returns these costs."""
    config, counts = drafter.config, counts_of(drafter.config.num_speculative_tokens)
    # Steps with the method's drafts, and with looked-up drafts if there are any.
    sources = {False: not config.spec.looks_up_alone, True: config.prompt_lookup_min is not None}
    steps = [(counts, functools.partial(time_steps, drafter, looked_up)) for looked_up, used in sources.items() if used]
    largest = most_requests(drafter.runner, counts, STEPS)
    costs = costs_of_engine(config, drafter.vllm_config, drafter.counters, largest, steps)
    if costs is not None:
        lookups = None if costs.lookup is None else StepCosts(costs.lookup)
        drafter.planner.controller = DraftLengthController(StepCosts(costs.method), ALL_KINDS, lookups=lookups)
    return costs


if current_platform.is_cpu():
    from vllm.v1.worker import cpu_worker
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    class CPUDraftingModelRunner(PrefillGenerators, DraftingRunnerMixin, CPUModelRunner):
        """vLLM's CPU model runner that drafts."""

        def load_model(self, *args: Any, **kwargs: Any) -> None:
            with self._loading():
                super().load_model(*args, **kwargs)

        def reload_weights(self, *args: Any, **kwargs: Any) -> None:
            with self._loading():
                super().reload_weights(*args, **kwargs)

        def _loading(self) -> AbstractContextManager[None]:
            stacked = self.drafter.config.schedule == "parallel"
            return plain_weights() if stacked else nullcontext()

    class DraftingWorker(WarmUpMixin, cpu_worker.CPUWorker):
        """vLLM's CPU worker; it takes its runner class from a module global, which is ours for that moment."""

        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            mend_expand_kernel()
            super().__init__(vllm_config, *args, **kwargs)

        def init_device(self) -> None:
            with temporarily(cpu_worker, CPUModelRunner=CPUDraftingModelRunner):
                super().init_device()

else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    class GPUDraftingModelRunner(DraftingRunnerMixin, GPUModelRunner):
        """vLLM's GPU model runner that drafts."""

    class DraftingWorker(WarmUpMixin, Worker):  # type: ignore[no-redef]
        """vLLM's GPU worker."""

        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            config = active_config(vllm_config)
            if config is not None and config.spec.cuts:
                without_full_graphs(vllm_config.compilation_config)
            super().__init__(vllm_config, *args, **kwargs)

        def _make_model_runner(self) -> GPUModelRunner:
            return GPUDraftingModelRunner(self.vllm_config, self.device)
