# SPDX-License-Identifier: Apache-2.0
"""Users' texts, read in one way by training, calibration and benchmarks.

files.py (lines, pieces, JSON values) -> records.py (text, chats, prompts, token ids) -> chats.py (rendered chats) ->
documents.py (token ids, skips). check.py looks at files before a model is loaded.
"""
