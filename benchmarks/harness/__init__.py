# SPDX-License-Identifier: Apache-2.0
"""Code that all benchmarks share.

options.py -> contenders.py (what is compared) -> session.py (turns) -> results.py (the file of results)
-> estimates.py (medians, ratios, intervals)

A contender runs as process.py (engine.py in a separate process) or as serve/server.py.
"""
