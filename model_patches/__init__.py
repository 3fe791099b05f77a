# SPDX-License-Identifier: Apache-2.0
"""Cutting a loaded vLLM model at exit layers into stacks that run separately; one
adapter per family.
"""
