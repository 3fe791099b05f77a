# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, by accelerate: one, several GPUs of a machine, or machines of a Ray cluster."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from vllm_ppd.heads.errors import TrainingError


def device_of(name: str) -> torch.device:
    """The device that a user names; `auto` takes a GPU where there is one.

    Raises:
        TrainingError: if it is none, or is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainingError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainingError(f"--device {name}: no CUDA device is available; use --device cpu")
    return device


class Processes:
    """What a run needs of its processes, of which torchrun, `accelerate launch` and Ray Train start several.

    Args:
        device: where a process that is alone computes; several get theirs from accelerate.
    """

    def __init__(self, device: str) -> None:
        alone = device_of(device)
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self._accelerator = Accelerator(cpu=device == "cpu", device_placement=self.world > 1)
        self.rank = self._accelerator.process_index
        self.is_main = self._accelerator.is_main_process
        self.device = self._accelerator.device if self.world > 1 else alone

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """The module to call and the optimiser to step; checkpoints are of these."""
        return self._accelerator.prepare(module, optimizer)

    def autocast(self, precision: str) -> Any:
        """bfloat16 arithmetic where that is the precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bfloat16")

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the processes."""
        return self._accelerator.reduce(tensor, "sum")

    def wait(self) -> None:
        self._accelerator.wait_for_everyone()

    def save_state(self, folder: Path) -> None:
        """Write what was prepared."""
        self._accelerator.save_state(str(folder))

    def load_state(self, folder: Path) -> None:
        """Read what was prepared."""
        self._accelerator.load_state(str(folder))


def over_ray(train: Callable[..., Any], options: Any) -> None:
    """Run train(options) in options.ray_workers Ray Train workers, a process each.

    All must share the folder of the heads.

    Raises:
        TrainingError: if Ray is not installed, and whatever a worker raises.
    """
    if importlib.util.find_spec("ray") is None:
        raise TrainingError("--ray-workers needs Ray Train: pip install 'vllm-ppd[ray]'")
    import ray
    from ray.train import ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS"), include_dashboard=False)
    use_gpu = options.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= options.ray_workers
    # Workers run elsewhere: what is a path here must be one there.
    paths = {"out": os.path.abspath(options.out), "data": tuple(map(os.path.abspath, options.data))}
    if options.states_cache is not None:
        paths["states_cache"] = os.path.abspath(options.states_cache)
    if os.path.isdir(options.model):
        paths["model"] = os.path.abspath(options.model)
    options = options.model_copy(update=paths)
    trainer = TorchTrainer(
        lambda: train(options), scaling_config=ScalingConfig(num_workers=options.ray_workers, use_gpu=bool(use_gpu))
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:  # it quotes the workers' tracebacks; their own errors are one line
        raise next(iter(getattr(error, "worker_failures", {}).values()), error) from error
