# SPDX-License-Identifier: Apache-2.0
"""What the tree promises: who imports whom, licence headers, sizes, and a registration that imports nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "heads", "model_patches", "vllm_plugins", "benchmarks")
MAY_IMPORT = {
    "kernels": set(),
    "heads": {"kernels"},
    "model_patches": {"heads", "kernels"},
    "vllm_plugins": {"heads", "kernels", "model_patches"},
    "benchmarks": {"heads", "kernels", "vllm_plugins"},
}
MAY_IMPORT_VLLM = {"model_patches", "vllm_plugins", "benchmarks"}
SOURCES = [path for folder in (*FOLDERS, "tests", ".ci") for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at any depth of nesting."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the namespace out"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_who_imports_whom(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            assert parts[0] not in FOLDERS, f"{path}: {name} must be imported as vllm_ppd.{name}"
            if parts[0] == "vllm_ppd":
                assert parts[1] in MAY_IMPORT[folder] | {folder}, f"{path} must not import {name}"
            if parts[0] == "vllm":
                assert folder in MAY_IMPORT_VLLM, f"{path} must not import vLLM"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_header_and_size(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert text.count("\n") <= 500


def test_registration_imports_nothing_heavy() -> None:
    """The entry point itself loads neither torch nor vLLM; the seams then touch only what vLLM has loaded anyway."""
    heavy = "assert not {'torch', 'vllm', 'pydantic', 'transformers'} & set(sys.modules)"
    code = f"import sys; from vllm_ppd.vllm_plugins import register; {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)
    code = "import sys; from vllm_ppd.vllm_plugins import seams, config, flags; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


def test_packages_are_listed() -> None:
    listed = (ROOT / "pyproject.toml").read_text()
    for folder in FOLDERS:
        for package in (p.parent for p in (ROOT / folder).rglob("__init__.py")):
            name = "vllm_ppd." + ".".join(package.relative_to(ROOT).parts)
            assert f'"{name}"' in listed, f"{name} is missing from pyproject.toml"
