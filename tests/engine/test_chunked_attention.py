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
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

pytestmark = pytest.mark.engine
CHUNK = 32  # a multiple of the CPU's block size


@pytest.fixture(scope="module")
def llama4(made_once: Factory) -> Path:
    """Without mixtures of experts, whose parallel group must be there before an engine
    of a dense model starts.
    """
    sizes: dict[str, Any] = {
        "attention_chunk_size": CHUNK,
        "interleave_moe_layer_step": 99,
        "moe_layers": [],
    }
    return made_once(
        "llama4-chunked", lambda folder: tiny.make_model(folder, "llama4", **sizes)
    )


def update(builder: Any, metadata: Any) -> None:
    """Divide the work by the sequence lengths that a shallow pass has written, as a
    GPU's backends do.
    """
    metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(metadata.seq_lens),
        num_heads=builder.num_heads,
        num_kv_heads=builder.num_kv_heads,
        head_dim=builder.head_dim,
        seq_lens=metadata.seq_lens,
        dtype=builder.dtype,
        query_start_loc=metadata.query_start_loc,
        causal=metadata.causal,
        sliding_window_size=builder.window_size,
        isa=builder.isa,
        enable_kv_split=True,
        kv_cache_dtype=builder.kv_cache_dtype,
    )


def test_output_is_vllms_across_chunks(
    llama4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        CPUAttentionMetadataBuilder, "supports_draft_decode_metadata_update", True
    )
    monkeypatch.setattr(
        CPUAttentionMetadataBuilder, "update_draft_decode_metadata", update
    )
    requests = [
        {"prompt_token_ids": [(7 * i + j) % 250 + 2 for j in range(20 + 5 * i)]}
        for i in range(2)
    ]
    settings: dict[str, Any] = {"max_num_seqs": 4, "block_size": CHUNK}
    expected = generate(start_engine(llama4, None, **settings), requests, greedy(48))
    options = {"method": "ppd", "exit_layer": 5, "num_speculative_tokens": 3}
    llm = start_engine(llama4, options, **settings)
    assert not drafter_of(llm).passes.capturable
    with counting(llm) as seen:
        assert generate(llm, requests, greedy(48)) == expected
    assert seen["accepted"] > 5
