# SPDX-License-Identifier: Apache-2.0
"""Measurements of recurrent heads, the same as of CP heads."""

from vllm_ppd.heads.cp.calibration import parts_measured, tables
from vllm_ppd.heads.recurrent.module import RecurrentHead

__all__ = ["PARTS", "tables"]
PARTS = parts_measured(RecurrentHead)
