# SPDX-License-Identifier: Apache-2.0
"""Users' texts, read in the same way by training, calibration, `ppd data` and
benchmarks.

files.py (JSON values, pieces of text) -> records.py (chats, prompts, texts, token IDs)
-> documents.py (rendered chats, token IDs, response masks, skips) -> prompts.py.
check.py looks at files before a model is loaded.
"""
