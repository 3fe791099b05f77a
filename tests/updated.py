# SPDX-License-Identifier: Apache-2.0
"""Both ways by which vLLM changes the weights of an engine that runs, to those of a
model folder.
"""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


class FileTransfer(WeightTransferEngine):
    """vLLM's engines send weights between GPUs; this one reads a file."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: Any) -> None:
        self.model.load_weights(iter(load_file(update_info["file"]).items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def init_transfer_engine(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    receive_weights = shutdown = init_transfer_engine


def change_weights(llm: Any, model: Path, way: str) -> None:
    """Give an engine of this process the weights of another model folder."""
    if way == "reload":
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        return
    worker = (
        llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    )
    runner = worker.model_runner
    worker.weight_transfer_engine = FileTransfer(
        None, runner.vllm_config, runner.device, runner.get_model()
    )
    try:
        worker.start_weight_update()
        worker.update_weights({"file": model / "model.safetensors"})
        worker.finish_weight_update()
    finally:
        worker.weight_transfer_engine = None
