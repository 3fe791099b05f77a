# SPDX-License-Identifier: Apache-2.0
"""`ppd env`: what a bug report needs."""

from __future__ import annotations

import os
import platform
from importlib.metadata import entry_points

from pydantic import BaseModel


class EnvOptions(BaseModel):
    """`ppd env` takes no options."""


def run(options: EnvOptions) -> int:
    from vllm_ppd.heads.training.provenance import machine, versions
    from vllm_ppd.vllm_plugins.patches import SUPPORTED_VLLM, is_supported, vllm_version

    version = vllm_version()
    lines = {
        "platform": platform.platform(),
        "machine": machine(),
        **versions(),
        "vLLM supported": f"{'yes' if is_supported(version) else 'no'} (supported: {SUPPORTED_VLLM}; found {version})",
        "plugin": _plugin(),
    }
    for name in sorted(os.environ):
        if name.startswith(("VLLM_", "PPD_", "CUDA_VISIBLE", "OMP_")) and "KEY" not in name and "TOKEN" not in name:
            lines[name] = os.environ[name]
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")
    return 0


def _plugin() -> str:
    if "vllm_ppd" not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        return "not registered: install vllm-ppd into the environment that runs vLLM"
    chosen = os.environ.get("VLLM_PLUGINS")
    off = chosen is not None and "vllm_ppd" not in chosen.split(",")
    return "switched off by VLLM_PLUGINS" if off else "registered"
