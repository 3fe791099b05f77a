# SPDX-License-Identifier: Apache-2.0
"""On-policy data: what the target itself writes, kept as token ids.

prompts.py (of files, or the beginning of a user turn) -> write.py (requests and answers, by an engine) -> output.py
"""
