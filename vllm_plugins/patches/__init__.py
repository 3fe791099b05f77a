# SPDX-License-Identifier: Apache-2.0
"""All patches of vLLM: `install.py` lists the wrapped calls, `start.py` and `running.py` have
the wrappers.
"""
