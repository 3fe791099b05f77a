# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares.

options.py -> contenders.py (who is compared) -> session.py (whose turn it is) -> results.py (the file of results)
-> estimates.py (medians, ratios, intervals)

A contender runs as process.py (engine.py in a process of its own) or as serve/server.py.
"""
