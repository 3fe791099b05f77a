# SPDX-License-Identifier: Apache-2.0
"""Measurements of recurrent heads, the same as of CP heads.

Tied heads are measured with more drafts than they were trained for, too.
"""

from collections.abc import Mapping
from functools import partial

import torch

from vllm_ppd.heads.calibration.run import parts_by_vocabulary
from vllm_ppd.heads.cp.calibration import by_drafts
from vllm_ppd.heads.cp.calibration import tables as tables
from vllm_ppd.heads.recurrent.config import RecurrentConfig
from vllm_ppd.heads.recurrent.module import RecurrentHead

LONGEST = 7  # drafts


def _longer(
    config: RecurrentConfig, tensors: Mapping[str, torch.Tensor]
) -> RecurrentHead:
    drafts = max(config.n_predict, min(LONGEST, config.max_drafts))
    return RecurrentHead(config, tensors, drafts)


PARTS = parts_by_vocabulary(partial(by_drafts, make=_longer))
