# SPDX-License-Identifier: Apache-2.0
"""Users' texts, read in one way by training, calibration and benchmarks.

files.py (lines, pieces, JSON values) -> records.py (text, rendered chats, token ids) -> documents.py (token ids, skips)
"""
