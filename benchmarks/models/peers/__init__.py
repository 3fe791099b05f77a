# SPDX-License-Identifier: Apache-2.0
"""Peers of the demo model, in vLLM's own formats: Medusa heads, an EAGLE head, and a draft model.

target.py (the frozen target and its corpus) -> medusa.py, eagle.py, draft_model.py (a Peer each) -> train.py
inflate.py makes what was trained as wide as an inflated target.
"""
