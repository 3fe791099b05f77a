# SPDX-License-Identifier: Apache-2.0
"""Heads that read a draft from a hidden state: modules, their checkpoints and (later) their training. No vLLM."""
