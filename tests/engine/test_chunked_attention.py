# SPDX-License-Identifier: Apache-2.0
"""Early drafting with chunked local attention (Llama 4): shallow passes attend to the
right chunk.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny
from cases import generate, greedy
from conftest import Factory, counting, drafter_of, start_engine
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

pytestmark = pytest.mark.engine
CHUNK = 32  # a multiple of the CPU's block size


@pytest.fixture(scope="module")
def llama4(made_once: Factory) -> Path:
    """Without mixtures of experts, whose parallel group must be there before an engine
    of a dense model starts.
    """
    return made_once(
        "llama4-chunked",
        lambda folder: tiny.make_model(
            folder,
            "llama4",
            attention_chunk_size=CHUNK,
            interleave_moe_layer_step=99,
            moe_layers=[],
        ),
    )


def test_output_is_vllms_across_chunks(
    llama4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata are built again for each pass, whatever the builder's base class updates."""
    builder = CPUAttentionMetadataBuilder
    monkeypatch.setattr(
        builder,
        "supports_draft_decode_metadata_update",
        True,
    )
    monkeypatch.setattr(
        builder,
        "update_draft_decode_metadata",
        lambda *_: None,
    )
    requests = [
        {"prompt_token_ids": [(7 * i + j) % 250 + 2 for j in range(20 + 5 * i)]}
        for i in range(2)
    ]
    settings: dict[str, Any] = {"max_num_seqs": 4, "block_size": CHUNK}
    expected = generate(
        start_engine(llama4, None, **settings), requests, greedy(48)
    )
    options = {
        "method": "early",
        "exit_layer": 5,
        "num_speculative_tokens": 3,
    }
    llm = start_engine(llama4, options, **settings)
    assert not drafter_of(llm).passes.capturable
    with counting(llm) as seen:
        assert generate(llm, requests, greedy(48)) == expected
    assert seen["accepted"] > 5
