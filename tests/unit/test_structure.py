# SPDX-License-Identifier: Apache-2.0
"""The tree: its size, who imports whom, license headers, and a registration that
imports nothing heavy.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Tokens of Python without comments and docstrings, which packing cannot lower. New code
# takes the place of other code.
MAX_SOURCE_TOKENS = 143_424
MAX_TEST_TOKENS = 129_000
MAX_DENSITY = 7.5  # tokens a code line, in each
MAX_EXEMPT = 5  # places that the formatter leaves alone
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

# The folders, and the rooms of the plugin, from the bottom up: each imports itself and
# those before it.
FOLDERS = ("kernels", "heads", "model_patches", "vllm_plugins", "benchmarks")
ROOMS = (
    "platform",
    "registry",
    "config",
    "draft_length",
    "engine",
    "methods",
    "patches",
    "cli",
)

# Beginnings of paths that may import vLLM at run time; a drafter never does, so that it
# runs without an engine.
MAY_IMPORT_VLLM = (
    "model_patches/",
    "vllm_plugins/platform.py",
    "vllm_plugins/engine/",
    "vllm_plugins/methods/",
    "vllm_plugins/patches/",
    "benchmarks/",
)

SOURCES = {
    str(path.relative_to(ROOT)): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
}
TESTS = {
    str(path.relative_to(ROOT)): path
    for path in sorted((ROOT / "tests").rglob("*.py"))
}


OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def imports(path: Path, typing: bool = True) -> frozenset[str]:
    """Every module, and name in a module, that a file imports, lazily too; with typing,
    those under TYPE_CHECKING.
    """
    statements = ast.parse(path.read_text()).body
    names = set()
    for statement in statements:
        is_condition = isinstance(statement, ast.If) and not typing
        if is_condition and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@cache
def files_imported(file: str) -> frozenset[str]:
    """The files of SOURCES that a file imports, or from which it imports a name."""
    files = set()
    for name in imports(SOURCES[file]):
        path = name.removeprefix("vllm_ppd.").replace(".", "/")
        parent = path.rpartition("/")[0]
        for place in (path, f"{path}/__init__", parent, f"{parent}/__init__"):
            if f"{place}.py" in SOURCES:
                files.add(f"{place}.py")
                break
    return frozenset(files - {file})


def size_of(text: str) -> tuple[int, int]:
    """Tokens of a file without its comments and docstrings, and the lines that hold one.

    An f-string is one token on every version of Python.
    """
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, OWNERS) and ast.get_docstring(node) is not None
    }
    tokens = 0
    depth = 0
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_END":
            depth -= 1
            continue
        is_docstring = (
            token.type == tokenize.STRING and token.start[0] in docstrings
        )
        if token.type not in NOT_CODE and not is_docstring:
            code_lines.update(range(token.start[0], token.end[0] + 1))
            if depth == 0:
                tokens += 1
        if name == "FSTRING_START":
            depth += 1
    return tokens, len(code_lines)


@pytest.mark.parametrize(
    ("files", "max_tokens"),
    [
        (SOURCES, MAX_SOURCE_TOKENS),
        (TESTS, MAX_TEST_TOKENS),
    ],
    ids=["source", "tests"],
)
def test_the_tree_is_within_its_budget(
    files: dict[str, Path], max_tokens: int
) -> None:
    sizes = [size_of(path.read_text()) for path in files.values()]
    tokens = sum(size[0] for size in sizes)
    lines = sum(size[1] for size in sizes)
    assert tokens <= max_tokens, (
        f"{tokens} tokens, {tokens - max_tokens} too many"
    )
    assert tokens <= MAX_DENSITY * lines, f"{tokens / lines} tokens a code line"


def test_hardly_anything_is_exempt_from_the_formatter() -> None:
    exempt = re.compile("fmt: " + "(skip|off)")
    lines = [
        f"{file}:{number}"
        for file, path in {**SOURCES, **TESTS}.items()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if exempt.search(line)
    ]
    assert len(lines) <= MAX_EXEMPT, lines


def test_files_begin_with_their_license() -> None:
    for path in [
        *SOURCES.values(),
        *TESTS.values(),
        *(ROOT / ".ci").rglob("*.py"),
    ]:
        assert path.read_text().startswith(
            "# SPDX-License-Identifier: Apache-2.0\n"
        ), path


def test_folders_import_those_below_them() -> None:
    for file, path in SOURCES.items():
        below = FOLDERS[: FOLDERS.index(file.partition("/")[0]) + 1]
        for first, *rest in (name.split(".") for name in imports(path)):
            assert first not in FOLDERS, (
                f"{file}: {first} must be imported as vllm_ppd.{first}"
            )
            assert first != "vllm_ppd" or rest[0] in below, (
                f"{file} must not import {rest[0]}"
            )


def test_rooms_of_the_plugin_import_those_below_them() -> None:
    rooms = {
        file: file.split("/")[1].removesuffix(".py")
        for file in SOURCES
        if file.startswith("vllm_plugins/")
    }
    del rooms["vllm_plugins/__init__.py"]
    for file, room in rooms.items():
        for target in files_imported(file) & rooms.keys():
            assert ROOMS.index(rooms[target]) <= ROOMS.index(room), (
                f"{file} must not import {target}"
            )


def test_methods_do_not_import_each_other() -> None:
    """But a worker group drafts early, over two stages."""
    methods = [
        file for file in SOURCES if file.startswith("vllm_plugins/methods/")
    ]
    for file in methods:
        room = file.split("/")[2]
        allowed = (room, "early") if room == "group" else (room,)
        for target in files_imported(file) & set(methods):
            assert target.split("/")[2] in allowed, (
                f"{file} must not import {target}"
            )


def test_no_circles_between_files() -> None:
    """Lazy imports and those for types alone counted."""
    # CycleError names the circle
    list(
        TopologicalSorter(
            {file: files_imported(file) for file in SOURCES}
        ).static_order()
    )


def test_who_imports_vllm() -> None:
    for file, path in SOURCES.items():
        drafter = re.fullmatch(
            r"vllm_plugins/methods/(\w+|early/drafter)\.py", file
        )
        allowed = file.startswith(MAY_IMPORT_VLLM) and not drafter
        names = [
            name
            for name in imports(path, typing=False)
            if name.split(".")[0] == "vllm"
        ]
        assert allowed or not names, (
            f"{file} must not import {names[0]}; see platform.py and engine/"
        )


def test_registration_imports_nothing_heavy() -> None:
    """The entry point itself loads neither torch nor vLLM; the patches then touch only
    what vLLM has loaded anyway.
    """
    code = """
import sys
from vllm_ppd.vllm_plugins import register
assert not {"torch", "vllm", "pydantic", "transformers"} & set(sys.modules)
from vllm_ppd.vllm_plugins.patches import install
from vllm_ppd.vllm_plugins.config import options
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


def test_help_imports_nothing_heavy() -> None:
    """torch and transformers take seconds to load: options are declared in modules that
    need neither.
    """
    code = """
import sys
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.vllm_plugins.cli.main import COMMANDS, main
names = [[], *([name] for name in COMMANDS), *(["train", kind] for kind in KINDS)]
for words in [*names, ["bench", "decode"]]:
    try:
        main([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0
    heavy = {"torch", "transformers", "vllm", "numpy"} & set(sys.modules)
    assert not heavy, f"ppd {words} imports {heavy}"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


def test_packages_are_listed() -> None:
    listed = (ROOT / "pyproject.toml").read_text()
    for folder in FOLDERS:
        for package in (p.parent for p in (ROOT / folder).rglob("__init__.py")):
            name = "vllm_ppd." + ".".join(package.relative_to(ROOT).parts)
            assert f'"{name}"' in listed, f"{name} is missing from pyproject.toml"
