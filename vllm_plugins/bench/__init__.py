# SPDX-License-Identifier: Apache-2.0
"""Measuring decoding: `ppd bench`.

options.py -> contenders.py (who) -> turns.py (who computes when) -> results.py (what is kept) -> table.py
decode: prompts.py -> schedule.py -> engine.py (one contender, in a process of its own)
serve:  serve_options.py -> workload.py -> serve.py -> server.py, generator.py (vLLM's own) -> serve_table.py
"""


class BenchError(ValueError):
    """Bad input or an engine that did not start; the message is one line: what, where, what to do instead."""
