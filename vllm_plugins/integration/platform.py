# SPDX-License-Identifier: Apache-2.0
"""What vLLM says of the platform, of its own options and of errors, for code that does not import it."""

from __future__ import annotations

from typing import Any


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def is_supported() -> bool:
    """Whether the platform is one that we draft on."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu() or current_platform.is_cuda_alike())


def device_name() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_name)


def older_ray_executor() -> bool:
    """Whether Ray is to run vLLM's older executor."""
    from vllm import envs

    return not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND


def is_speculative_option(name: str) -> bool:
    """Whether vLLM's own speculative methods have an option of this name."""
    from vllm.config import SpeculativeConfig

    return name in SpeculativeConfig.__dataclass_fields__


def invalid_request(message: str, parameter: str) -> Exception:
    """An error that vLLM's front end answers with HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    error: Any = VLLMValidationError(message, parameter=parameter)
    return error
