# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `ppd bench decode`, its report, and further scripts.

options.py    of `ppd bench decode`
systems.py    what is compared
prompts.py    on what
engine.py     an engine in a separate process
decode.py     the loop in which engines take turns
storage.py    files of results
report.py     tables and plots

gpu/      times of kernels, and the calls of CUDA in a step
models/   the demo corpus and model, the inflated models and an EAGLE head
results/  stored results
"""

from vllm_ppd.heads.errors import UserError

BASE = "vLLM"  # the system without speculation, to which others are compared
CONTROL = "vLLM, again"  # a second engine of it, which shows the noise


class BenchError(UserError):
    """Bad input of a benchmark, or an engine that fails."""
