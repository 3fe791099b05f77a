# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `ppd bench decode`, its report, and further scripts.

systems.py    what `ppd bench decode` compares: its options and systems
prompts.py    on what
engine.py     an engine in a separate process
decode.py     the loop in which engines take turns
storage.py    files of results
report.py     tables and plots

gpu/      times of kernels, and the calls of CUDA in a step
models/   the demo corpus and model, the inflated models and an EAGLE head
results/  stored results
"""
