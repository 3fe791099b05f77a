# SPDX-License-Identifier: Apache-2.0
"""What the tree promises: who imports whom, licence headers, sizes, and a registration that imports nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "heads", "model_patches", "vllm_plugins", "benchmarks")
MAY_IMPORT = {
    "kernels": set(),
    "heads": {"kernels"},
    "model_patches": {"heads", "kernels"},
    "vllm_plugins": {"heads", "kernels", "model_patches"},
    "benchmarks": {"heads", "kernels", "vllm_plugins"},
}
MAY_IMPORT_VLLM = {"model_patches", "vllm_plugins", "benchmarks"}  # of the plugin only integration/, see below
SOURCES = [path for folder in (*FOLDERS, "tests", ".ci") for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path, at_start: bool = False) -> set[str]:
    """Every module that a file imports, at any depth of nesting; at_start: those alone that load with it."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if at_start else ast.walk(tree):
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
def test_header(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")


def test_who_reads_vllm() -> None:
    """Options, the choice of drafts and the drafters do not import vLLM: platform.py and engine/ tell them of it."""
    plugin = ROOT / "vllm_plugins"
    rooms = [path for room in ("config", "drafting", "draft_length", "cli") for path in (plugin / room).rglob("*.py")]
    for path in [*rooms, *plugin.rglob("drafter.py"), plugin / "registry.py", plugin / "method_spec.py"]:
        for name in without_type_checking(path):
            assert name.split(".")[0] != "vllm", f"{path} must not import {name}; see engine/"


def test_engine_imports_no_method() -> None:
    for path in (ROOT / "vllm_plugins" / "engine").rglob("*.py"):
        for name in imports(path):
            assert not name.startswith("vllm_ppd.vllm_plugins.methods"), f"{path} must not import {name}"


def test_methods_do_not_import_each_other() -> None:
    folder = ROOT / "vllm_plugins" / "methods"
    for path in folder.rglob("*.py"):
        for name in imports(path):
            _, is_method, path_of_other = name.partition("vllm_ppd.vllm_plugins.methods.")
            room, other = path.relative_to(folder).parts[0], path_of_other.split(".")[0]
            # A worker group drafts early, over two stages.
            assert not is_method or other in (room, *(["early"] if room == "group" else [])), (
                f"{path} must not import {name}"
            )


def without_type_checking(path: Path) -> set[str]:
    """What a file imports at run time."""
    tree = ast.parse(path.read_text())
    for node in list(tree.body):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            tree.body.remove(node)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_import_circles() -> None:
    """Of modules that load each other when they load."""
    files = {
        "vllm_ppd." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    }  # fmt: skip
    loads: dict[str, set[str]] = {}
    for module, path in files.items():
        names = imports(path, at_start=True)
        loads[module] = {name if name in files else name.rpartition(".")[0] for name in names} & set(files)
    list(TopologicalSorter(loads).static_order())  # CycleError names the circle


def test_registration_imports_nothing_heavy() -> None:
    """The entry point itself loads neither torch nor vLLM; the patches then touch only what vLLM has loaded anyway."""
    heavy = "assert not {'torch', 'vllm', 'pydantic', 'transformers'} & set(sys.modules)"
    code = f"import sys; from vllm_ppd.vllm_plugins import register; {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)
    modules = "from vllm_ppd.vllm_plugins.config import flags, options; from vllm_ppd.vllm_plugins import patches"
    code = f"import sys; {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


COMMANDS = ("", "data", "train", "train early", "train cp", "train dynamo", "calibrate", "plan", "inspect", "env")
BENCHES = ("", " decode", " serve", " closed-loop", " open-loop", " group", " acceptance", " curves", " tables")


@pytest.mark.parametrize("command", [*COMMANDS, *(f"bench{kind}" for kind in BENCHES)])
def test_help_imports_nothing_heavy(command: str) -> None:
    """torch and transformers take seconds to load: options are declared in modules that need neither."""
    assert not loaded([*command.split(), "--help"]) & {"torch", "transformers", "vllm", "numpy"}


@pytest.mark.parametrize("kind", ["early", "cp", "dynamo"])
def test_inspect_imports_nothing_heavy(kind: str) -> None:
    """The demo model's config.json and checkpoint say all that its heads are compared with, and numpy reads it."""
    assert not loaded(["inspect", str(ROOT / "benchmarks/demo/heads" / kind)]) & {"torch", "transformers", "vllm"}


def loaded(argv: list[str]) -> set[str]:
    """The top-level modules that a `ppd` command loads, which must end with exit code 0."""
    code = (
        "import sys\nfrom vllm_ppd.vllm_plugins.cli.main import main\n"
        f"try:\n    code = main({argv!r})\nexcept SystemExit as end:\n    code = end.code\n"
        "assert code == 0, code\nprint(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent, capture_output=True, text=True)
    return set(process.stderr.split())


def test_packages_are_listed() -> None:
    listed = (ROOT / "pyproject.toml").read_text()
    for folder in FOLDERS:
        for package in (p.parent for p in (ROOT / folder).rglob("__init__.py")):
            name = "vllm_ppd." + ".".join(package.relative_to(ROOT).parts)
            assert f'"{name}"' in listed, f"{name} is missing from pyproject.toml"
