# SPDX-License-Identifier: Apache-2.0
"""Heads that read a draft from a hidden state: modules, checkpoints, training,
calibration, planning. No vLLM.
"""
