# SPDX-License-Identifier: Apache-2.0
"""The target: packed documents are computed as each is alone, and heads learn its own
logits.
"""


import pytest
import torch
from conftest import Factory

from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt_neox", "gpt_oss", "llama4", "olmo2"]
)
def test_packed_documents_do_not_see_each_other(
    tiny_model: Factory, family: str
) -> None:
    target = Target(str(tiny_model(family)), torch.device("cpu"), torch.float32)
    torch.manual_seed(0)
    ids = torch.randint(1, 200, (1, 60))
    lengths = [7, 40, 13]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = target.run(Batch(ids, positions), exits=(2, 5))
    start = 0
    for length in lengths:
        window = slice(start, start + length)
        alone = target.run(
            Batch(ids[:, window], torch.arange(length)[None]), exits=(2, 5)
        )
        torch.testing.assert_close(
            packed.final[window], alone.final, atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(
            packed.exits[2][window], alone.exits[2], atol=1e-4, rtol=1e-4
        )
        start += length
