# SPDX-License-Identifier: Apache-2.0
"""Measuring decoding: `ppd bench`.

options.py -> contenders.py, prompts.py -> schedule.py (who computes when) -> engine.py (one contender, in a process of
its own) -> results.py (what is kept) -> table.py
"""


class BenchError(ValueError):
    """Bad input or an engine that did not start; the message is one line: what, where, what to do instead."""
