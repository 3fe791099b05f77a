# SPDX-License-Identifier: Apache-2.0
"""What vLLM says of the platform, of its own options and of errors, for code that does
not import it.
"""

import ctypes
import importlib.metadata
import os
import signal
import sys
from typing import Any, get_args

# Id of the process with which its engine must end, even if that is killed
ENDS_WITH = "PPD_ENDS_WITH"
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux; it lasts through exec
PARTITION = "VLLM_PP_LAYER_PARTITION"  # vLLM's variable for layers per stage
# Share of a GPU's memory that must be free before vLLM starts; the KV cache's size is
# set separately
GATE = 0.01


def end_with_parent() -> None:
    """End this process of an engine when its parent ends, however that does, if
    ENDS_WITH asks for it.
    """
    if os.environ.get(ENDS_WITH, str(os.getpid())) != str(os.getpid()):
        on_end_of_parent(signal.SIGKILL)


def on_end_of_parent(number: signal.Signals) -> None:
    """Ask the system to send this process a signal when its parent ends, however that does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, number)


def version() -> str:
    """The version of this package."""
    return importlib.metadata.version("vllm-ppd")


def current() -> Any:
    """vLLM's platform."""
    from vllm.platforms import current_platform

    return current_platform


def is_cpu() -> bool:
    return current().is_cpu()


def variable(name: str, default: Any = None) -> Any:
    """One of vLLM's environment variables, parsed by it; the default if it has none of
    this name.
    """
    from vllm import envs

    return getattr(envs, name, default)


def has_triton() -> bool:
    """Whether vLLM can run its Triton kernels here, which its model runner V2 is made of."""
    from vllm.triton_utils import HAS_TRITON

    return HAS_TRITON


def kv_cache(gib: float) -> dict[str, Any]:
    """Engine arguments for a KV cache of so many GiB, with which engines start beside
    others on a GPU.

    vLLM checks at the start that gpu_memory_utilization of a GPU is free, 0.92 of it by
    default, also where the size of the KV cache is given and nothing else comes from
    that share.
    """
    import torch

    gate = {"gpu_memory_utilization": GATE} if torch.cuda.is_available() else {}
    return {"kv_cache_memory_bytes": int(gib * (1 << 30)), **gate}


def is_speculative_option(name: str) -> bool:
    """Whether vLLM's own speculative methods have an option of this name."""
    from vllm.config import SpeculativeConfig

    return name in SpeculativeConfig.__dataclass_fields__


def speculative_methods() -> set[str]:
    """Names of vLLM's own speculative methods."""
    from vllm.config.speculative import SpeculativeMethod

    return set(get_args(SpeculativeMethod))


def speculators_algorithms() -> set[str]:
    """Algorithms of speculators' checkpoints that vLLM loads."""
    from vllm.transformers_utils.configs.speculators.algos import (
        SUPPORTED_SPECULATORS_TYPES,
    )

    return set(SUPPORTED_SPECULATORS_TYPES)


def invalid_request(message: str, parameter: str) -> Exception:
    """An error that vLLM's front end answers with HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message, parameter=parameter)


def connector_is_rdma(kv_transfer_config: Any) -> bool:
    """Whether another machine may write KV, in no order with this GPU's streams."""
    named = str(kv_transfer_config).lower()  # with those in a MultiConnector
    return "nixl" in named or "mooncake" in named


def connector_works_by_layers(kv_transfer_config: Any) -> bool:
    """Whether a connector moves the KV of each layer as the layer runs, rather than
    that of blocks around a step.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import (
        KVConnectorFactory,
    )

    connector = KVConnectorFactory.get_connector_class(kv_transfer_config)
    extra = kv_transfer_config.kv_connector_extra_config or {}
    return (
        connector.requires_piecewise_for_cudagraph(extra)
        or connector.__name__ == "MoRIIOConnector"
    )
