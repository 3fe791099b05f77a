# SPDX-License-Identifier: Apache-2.0
"""Measurements of recurrent heads, the same as of CP heads."""

from functools import partial

from vllm_ppd.heads.calibration.run import parts_by_vocabulary
from vllm_ppd.heads.cp.calibration import by_drafts, tables
from vllm_ppd.heads.recurrent.module import RecurrentHead

__all__ = ["PARTS", "tables"]
PARTS = parts_by_vocabulary(partial(by_drafts, make=RecurrentHead))
