# SPDX-License-Identifier: Apache-2.0
"""The digest of what a result was measured with: what changes it, in a small tree of the same form."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ppd.benchmarks.harness import sources

FILES = {
    "benchmarks/decode/run.py": "from vllm_ppd.benchmarks.decode.table import body\nfrom vllm_ppd.heads.read import x",
    "benchmarks/decode/table.py": "body = 1",
    "heads/read.py": '"""Read."""\n\n\ndef x():\n    """Say x."""\n    return "#1"  # why\n',
    "heads/other.py": "y = 1",
    "heads/named.py": "z = 1",
    "heads/read_triton.py": "kernel = 1",
    "vllm_plugins/engine/host.py": "host = 1\nNAMED = 'vllm_ppd.heads.named.Adapter'",
    "vllm_plugins/methods/cp/drafter.py": "cp = 1",
    "vllm_plugins/methods/dynamo/drafter.py": "dynamo = 1",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    yield tmp_path
    forget()


def forget() -> None:
    for name in ("digest", "files_imported", "files_loaded", "_nodes", "digest_of_file"):
        getattr(sources, name).cache_clear()


def digest(gpu: bool) -> str:
    forget()
    return sources.digest("decode", ("cp",), gpu)


@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        ("heads/read.py", "why", "for a reason", False),
        ("heads/read.py", "  # why\n", "\n\n\n# At the end.\n", False),
        ("heads/read.py", "Say x.", "Say x,\n    and why.", False),
        ("heads/read.py", "#1", "#2", True),
        ("heads/read.py", "    return", "    if True:\n        return", True),
        ("heads/other.py", "1", "2", False),  # not imported
        ("heads/named.py", "1", "2", True),
        ("benchmarks/decode/table.py", "1", "2", False),  # shows turns
        ("vllm_plugins/engine/host.py", "1", "2", True),
        ("vllm_plugins/methods/cp/drafter.py", "1", "2", True),
        ("vllm_plugins/methods/dynamo/drafter.py", "1", "2", False),  # another method
    ],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_only_code_that_ran_changes_the_digest(
    tree: Path, file: str, old: str, new: str, changes: bool, gpu: bool
) -> None:
    before = digest(gpu)
    assert old in FILES[file]
    (tree / file).write_text(FILES[file].replace(old, new))
    assert (digest(gpu) != before) is changes


@pytest.mark.parametrize("gpu", [False, True])
def test_kernels_count_where_they_ran(tree: Path, gpu: bool) -> None:
    before = digest(gpu)
    (tree / "heads/read_triton.py").write_text("more = 1")
    assert (digest(gpu) != before) is gpu


@pytest.mark.parametrize(
    ("config", "folders"),
    [
        ({"method": "ppd", "candidates": 3}, {"early", "group"}), ({"method": "ppd"}, {"early"}),
        ({"method": "ngram"}, set()), ({}, set()), ({"model": "none"}, set()),
    ],
)  # fmt: skip
def test_methods_are_those_that_a_config_runs(config: dict[str, object], folders: set[str]) -> None:
    assert sources.folders_of(config) == folders


def test_every_benchmark_names_a_file() -> None:
    assert all((sources.ROOT / file).is_file() for file in sources.BENCHMARKS.values())
