# SPDX-License-Identifier: Apache-2.0
"""Ten thousand requests to a real server of each method, compared with those of vLLM alone.

workload.py (the requests) -> client.py (sends them, samples memory) -> checks.py (what is wrong) -> run.py (the report)
"""
