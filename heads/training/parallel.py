# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, managed by accelerate: one, several GPUs of a machine, or machines of a Ray cluster."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator

from vllm_ppd.heads.errors import TrainingError


def device_of(name: str) -> torch.device:
    """The device that a user names; `auto` is a GPU if there is one.

    Raises:
        TrainingError: if the name is not a device, or the device does not exist.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainingError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count() or "no"
        raise TrainingError(f"--device {name}: {count} CUDA devices are available; use another, or --device cpu")
    return device


def cpu_computes_bfloat16() -> bool:
    """Whether the processor has bfloat16 instructions; others emulate them, which is several times slower."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class Processes(Accelerator):
    """The processes of a run, of which torchrun, `accelerate launch` and Ray Train start several.

    Args:
        device: of a single process; several get theirs from accelerate.
    """

    def __init__(self, device: str) -> None:
        alone, several = device_of(device), int(os.environ.get("WORLD_SIZE", "1")) > 1
        self._alone = None if several else alone
        super().__init__(cpu=device == "cpu", device_placement=several)

    @property
    def device(self) -> torch.device:
        return self._alone or self.state.device

    def arithmetic(self, precision: str) -> Any:
        """A context of bfloat16 arithmetic if that is the precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bfloat16")


def over_ray(train: Callable[..., Any], options: Any) -> None:
    """Run train(options) in options.ray_workers Ray Train workers, each a process.

    All workers must have access to the heads folder (a shared file system).

    Raises:
        TrainingError: if Ray is not installed. Errors of workers are raised, too.
    """
    if importlib.util.find_spec("ray") is None:
        raise TrainingError("--ray-workers needs Ray Train: pip install 'vllm-ppd[ray]'")
    import ray
    from ray.train import ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS"), include_dashboard=False)
    use_gpu = options.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= options.ray_workers
    # Workers run in other folders, so paths must be absolute.
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
    except TrainingFailedError as error:  # it quotes the workers' tracebacks; our own errors are one line
        raise next(iter(getattr(error, "worker_failures", {}).values()), error) from error
