# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `ppd bench decode`, its report, and further scripts.

options.py -> systems.py (what is compared) -> decode.py (trials in turns) -> storage.py (files) -> report.py (tables)
engine.py runs a system in a separate process, prompts.py reads the data.

gpu/      times of kernels, and the calls of CUDA in a step
models/   the demo corpus and model, the inflated models and an EAGLE head
results/  stored results
"""

from vllm_ppd.heads.errors import UserError


class BenchError(UserError):
    """Bad input of a benchmark, or an engine that fails."""
