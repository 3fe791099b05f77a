# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `ppd bench KIND`, and `python -m vllm_ppd.benchmarks.FOLDER.NAME` for the rest.

harness/  contenders, engines, turns, files of results, statistics, for all benchmarks
acceptance/  equal output, and accepted drafts, on all prompts of a file
decode/   batches of fixed size; worker groups beside Theorem 4.1
serve/    requests that arrive at real servers
models/   the demo corpus and model, the inflated models and an EAGLE head
gpu/      times of kernels, and the launches of a step
results/  results, and the page made of them
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_ppd.heads.errors import UserError
from vllm_ppd.heads.locking import InUse, writing_file


class BenchError(UserError):
    """Bad input of a benchmark, or an engine that did not start."""


@contextlib.contextmanager
def only_writer(out: Path) -> Iterator[None]:
    """The file that a script writes, locked against others; if another process writes it, exit with one line."""
    try:
        with writing_file(out):
            yield
    except InUse as error:
        sys.exit(f"error: {error}")
