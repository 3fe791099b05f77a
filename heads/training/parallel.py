# SPDX-License-Identifier: Apache-2.0
"""One process, or several: GPUs of a machine through accelerate, machines through Ray Train (both optional)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vllm_ppd.heads.errors import TrainingError


class Processes:
    """What a run needs of its processes; alone it does nothing.

    `accelerate launch -m ...`, torchrun and Ray Train set WORLD_SIZE; accelerate then wraps module and optimiser.
    """

    def __init__(self, device: str) -> None:
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        self.accelerator: Any = None
        if self.world > 1:
            if importlib.util.find_spec("accelerate") is None:
                raise TrainingError("training in several processes needs accelerate: pip install 'vllm-ppd[train]'")
            from accelerate import Accelerator

            self.accelerator = Accelerator(cpu=device == "cpu")
            self.device = self.accelerator.device
        elif device == "auto":
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        else:
            try:
                self.device = torch.device(device)
            except RuntimeError as error:
                raise TrainingError(f"--device {device}: {str(error).splitlines()[0]}") from None
            if self.device.type == "cuda" and not torch.cuda.is_available():
                raise TrainingError(f"--device {device}: no CUDA device is available; use --device cpu")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """The module to call and the optimiser to step."""
        return (module, optimizer) if self.accelerator is None else self.accelerator.prepare(module, optimizer)

    def autocast(self, precision: str) -> Any:
        """bfloat16 arithmetic where that is the precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bfloat16")

    def backward(self, loss: torch.Tensor) -> None:
        if self.accelerator is None:
            loss.backward()
        else:
            self.accelerator.backward(loss)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the processes."""
        return tensor if self.accelerator is None else self.accelerator.reduce(tensor, "sum")

    def wait(self) -> None:
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()


def over_ray(train: Callable[..., Any], options: Any) -> None:
    """Run train(options) in options.ray_workers Ray Train workers, a process each.

    All must share the folder of the heads.

    Raises:
        TrainingError: if Ray or accelerate is not installed, and whatever a worker raises.
    """
    if any(importlib.util.find_spec(name) is None for name in ("ray", "accelerate")):
        raise TrainingError("--ray-workers needs Ray Train: pip install 'vllm-ppd[ray]'")
    import ray
    from ray.train import ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS"), include_dashboard=False)
    use_gpu = options.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= options.ray_workers
    # Workers run elsewhere: what is a path here must be one there.
    places = {"out": os.path.abspath(options.out), "data": tuple(map(os.path.abspath, options.data))}
    if options.states_cache is not None:
        places["states_cache"] = os.path.abspath(options.states_cache)
    if os.path.isdir(options.model):
        places["model"] = os.path.abspath(options.model)
    options = options.model_copy(update=places)
    trainer = TorchTrainer(
        lambda: train(options), scaling_config=ScalingConfig(num_workers=options.ray_workers, use_gpu=bool(use_gpu))
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:  # it quotes the workers' tracebacks; their own errors are one line
        raise next(iter(getattr(error, "worker_failures", {}).values()), error) from error
