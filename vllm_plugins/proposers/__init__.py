# SPDX-License-Identifier: Apache-2.0
"""Proposers: what drafts. Each is the class that vLLM's `custom_class` method loads, driven by runner.py."""
