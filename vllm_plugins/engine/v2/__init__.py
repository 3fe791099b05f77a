# SPDX-License-Identifier: Apache-2.0
"""Drafting on vLLM's model runner V2: worker, runner, and the speculators that run the methods' drafters."""
