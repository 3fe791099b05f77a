# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares.

options.py -> contenders.py (who is compared) -> session.py (who computes when) -> results.py (what is kept)
-> estimates.py (medians, ratios, intervals)

A contender runs as engine.py (in this process), process.py (an engine in its own process) or serve/server.py.
"""
