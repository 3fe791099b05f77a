# SPDX-License-Identifier: Apache-2.0
"""The source files with which a result was measured, and their digest, which identifies results of older code."""

import ast
import hashlib
import io
import subprocess
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.io import load_config
from vllm_ppd.vllm_plugins.registry import METHODS

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = {  # by the value of "benchmark" in a file of results
    "decode": "benchmarks/decode/run.py", "acceptance": "benchmarks/acceptance/run.py",
    "serve": "benchmarks/serve/run.py", "soak": "tests/soak.py", "rows": "benchmarks/gpu/steps.py",
    "kernels": "benchmarks/gpu/kernels.py",
}  # fmt: skip
# Summaries, lists of methods and kinds, and what `ppd data` runs do not influence results.
LEFT_OUT = (
    "/table.py", "/estimates.py", "/results.py", "/sources.py", "/in_words.py", "/provenance.py", "/registry.py",
    "/kinds.py", "/engine/generation.py",
)  # fmt: skip
PLUGIN, METHOD_FOLDERS = "vllm_plugins/", "vllm_plugins/methods/"
TRITON = "_triton.py"


@cache
def files_imported(file: str) -> frozenset[str]:
    """The files of this project that a file imports, also lazily, including __init__.py of packages it imports from.

    Args:
        file: path from the root of the tree, like the returned ones.
    """
    names = set()
    for node in _nodes(file):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return _files(names) - {file}


@cache
def files_loaded(file: str) -> frozenset[str]:
    """The files that a file imports or loads by name: by pkgutil.resolve_name, or as a reference's Triton namesake."""
    texts = {node.value for node in _nodes(file) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    loaded, namesake = files_imported(file) | _files(texts) - {file}, file.removesuffix(".py") + TRITON
    return loaded | {namesake} if (ROOT / namesake).is_file() else loaded


@cache
def _nodes(file: str) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse((ROOT / file).read_text())))


def _files(names: Iterable[str]) -> frozenset[str]:
    """The files of this project behind dotted names of modules or of what is in them."""
    files = set()
    for path in (name.removeprefix("vllm_ppd.").replace(".", "/") for name in names if name.startswith("vllm_ppd.")):
        choices = (f"{place}{end}" for place in (path, path.rpartition("/")[0]) for end in (".py", "/__init__.py"))
        files.add(next((file for file in choices if (ROOT / file).is_file()), ""))
    return frozenset(files - {""})


def sources(benchmark: str, configs: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    """The identity of the code with which a benchmark measures contenders on this machine, stored beside results.

    Args:
        benchmark: a name of BENCHMARKS.
        configs: speculative_config of each contender; for a heads folder that cannot be read no method is known.
    """
    import torch

    methods = tuple(sorted({name for config in configs for name in folders_of(config or {})}))
    gpu = torch.cuda.is_available()
    return {"benchmark": benchmark, "methods": list(methods), "gpu": gpu, "digest": digest(benchmark, methods, gpu)}


def are_current(stored: dict[str, Any] | None) -> bool:
    """Whether the code that measured a result is the current one, except for what digest_of_file leaves out."""
    if stored is None or "gpu" not in stored:  # measured before drafting was of one runner
        return False
    return bool(stored["digest"] == digest(stored["benchmark"], tuple(stored["methods"]), stored["gpu"]))


@cache
def digest(benchmark: str, methods: tuple[str, ...], gpu: bool) -> str:
    """The digest of all files that a benchmark runs with some methods (folders of methods/)."""
    files = files_of(benchmark, methods, gpu)
    return hashlib.sha256("".join(f"{file} {digest_of_file(file)}\n" for file in files).encode()).hexdigest()[:16]


def files_of(benchmark: str, methods: Iterable[str], gpu: bool) -> list[str]:
    """Files of the benchmark, of the plugin with these methods only, and their imports.

    Triton kernels count only on a GPU.
    """
    folders = tuple(f"{METHOD_FOLDERS}{method}/" for method in methods)

    def runs(file: str) -> bool:
        if file.endswith(LEFT_OUT) or (file.startswith(METHOD_FOLDERS) and not file.startswith(folders)):
            return False
        return gpu or not file.endswith(TRITON)

    plugin = (str(path.relative_to(ROOT)) for path in (ROOT / PLUGIN).rglob("*.py"))
    todo, reached = [BENCHMARKS[benchmark], *(file for file in plugin if "/cli/" not in file)], set()
    while todo:
        file = todo.pop()
        if file not in reached and runs(file):
            reached.add(file)
            todo += files_loaded(file)
    return sorted(reached)


def changed_since(commit: str, files: Iterable[str]) -> int:
    """How many of some files differ from those of a commit, by git; all if it does not know the commit."""
    listed = list(files)
    command = ["git", "diff", "--name-only", commit, "--", *listed]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return len(run.stdout.splitlines()) if run.returncode == 0 else len(listed)


def folders_of(config: dict[str, Any]) -> set[str]:
    """The folders of methods/ that a speculative_config runs; none for vLLM's own methods."""
    method = config.get("method")
    if method is None and config.get("model"):
        try:
            method = load_config(config["model"]).method
        except HeadsError:
            return set()
    if method not in METHODS:
        return set()
    group = METHODS[method].group
    paths = [METHODS[method].drafter, *([group.worker] if group and "candidates" in config else [])]
    return {path.split(".methods.")[1].split(".")[0] for path in paths}


@cache
def digest_of_file(file: str) -> str:
    """The digest of a file's lines without comments, docstrings, descriptions of options and empty lines."""
    text = (ROOT / file).read_text()
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = token.line[: token.start[1]]
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        prose = first.value if isinstance(first, ast.Expr) else None
        if isinstance(node, ast.keyword) and node.arg == "description":
            prose = node.value
        if isinstance(prose, ast.Constant | ast.JoinedStr) and isinstance(getattr(prose, "value", ""), str):
            start, end = prose.lineno - 1, prose.end_lineno or prose.lineno
            head, tail = lines[start].encode()[: prose.col_offset], lines[end - 1].encode()[prose.end_col_offset :]
            lines[start:end] = [(head + tail).decode(), *[""] * (end - start - 1)]
    return hashlib.sha256("\n".join(line.rstrip() for line in lines if line.strip()).encode()).hexdigest()
