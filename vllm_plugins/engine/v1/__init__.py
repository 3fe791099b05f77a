# SPDX-License-Identifier: Apache-2.0
"""Drafting on vLLM's runner V1: worker, runner, and passes of a part of the target between steps."""
