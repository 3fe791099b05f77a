# SPDX-License-Identifier: Apache-2.0
"""Speculators of vLLM's own methods, to compare with: EAGLE, Medusa and a draft model, recipes of our training loop.

`python -m vllm_ppd.benchmarks.models peer eagle --model M --data train.jsonl --out DIR`
"""
