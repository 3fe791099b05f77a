# SPDX-License-Identifier: Apache-2.0
"""Users' texts, read in the same way by training, calibration, `ppd data` and
benchmarks.

records.py (files, JSON values, chats, prompts, texts, token IDs) -> documents.py
(rendered chats, token IDs, response masks, skips, prompts).
"""
