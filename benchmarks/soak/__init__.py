# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests to a real server of each method, with answers compared with vLLM's alone.

workload.py (the requests) -> client.py (sends them, samples memory) -> checks.py (finds faults) -> run.py (the report)
"""
