# SPDX-License-Identifier: Apache-2.0
"""On-policy data: texts that the target itself writes, kept as token ids.

prompts.py (from files, or the beginning of a user turn) -> write.py (requests and answers of an engine) -> output.py
"""
