# SPDX-License-Identifier: Apache-2.0
"""Width inflation: the inflated model says, drafts and accepts what the original does, at a higher cost."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from cases import generate, greedy
from conftest import DEMO, start_engine
from heads_folders import config_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.models.inflate import InflateOptions, inflate_heads, inflate_model, run
from vllm_ppd.heads.cp.module import CPHead
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.io import load_tensors, save_heads

HEADS = DEMO.parent / "heads"
KINDS = ("early", "cp", "dynamo")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
@pytest.mark.parametrize("times", [2, 3])
def test_logits_are_the_originals(tmp_path: Path, family: str, changes: dict[str, Any], times: int) -> None:
    model = tiny.make_model(tmp_path / "small", family, **changes)
    for weights in model.glob("*.safetensors"):
        _fill_biases(weights)
    inflate_model(model, tmp_path / "large", times)
    small, large = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, tmp_path / "large"))
    sizes = [sum(p.numel() for p in m.parameters()) for m in (small, large)]
    assert times < sizes[1] / sizes[0] <= times**2
    assert json.loads((tmp_path / "large" / "provenance.json").read_text())["parameters"] == sizes[1]
    ids = torch.randint(2, 300, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, inflated = (m(ids, output_hidden_states=True) for m in (small, large))
    torch.testing.assert_close(inflated.logits, expected.logits, rtol=1e-5, atol=2e-5 * float(expected.logits.std()))
    assert inflated.hidden_states[3].shape[-1] == times * expected.hidden_states[3].shape[-1]


def _fill_biases(path: Path) -> None:
    """Fresh biases are zero, and fresh norms one, which would hide a wrong rule."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(path)
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_recurrent_head_drafts_as_the_original(tmp_path: Path) -> None:
    model, sizes = tiny.make_model(tmp_path / "tiny"), {"rank": 2, "condition": "recurrent", "layers": (1,)}
    inflate_model(model, tmp_path / "large", 3)
    head, larger = (CPHead(64 * n, 3, inner_size=32 * n, seed=None, **sizes) for n in (1, 3))  # type: ignore[arg-type]
    tensors = {f"cp.{name}": 0.1 * torch.randn_like(tensor) for name, tensor in head.state_dict().items()}
    save_heads(tmp_path / "head", config_of("cp", model, inner_size=32, token_counts=False, **sizes), tensors)
    inflate_heads(tmp_path / "head", tmp_path / "large", tmp_path / "heads", 3)
    for module, stored in ((head, tensors), (larger, load_tensors(tmp_path / "heads")[1])):
        module.load_state_dict({name.removeprefix("cp."): tensor for name, tensor in stored.items()})
    final, layer, embedded = torch.randn(5, 64), torch.randn(5, 64), torch.randn(5, 2, 64)
    expected = torch.nn.functional.pad(head.states(torch.cat([final, layer], dim=-1), embedded), (0, 128))
    padded = torch.nn.functional.pad(final, (0, 128))  # the target's last norm is zero there
    states = larger.states(torch.cat([padded, layer, layer, layer], dim=-1), embedded.repeat(1, 1, 3))
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_inflated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="'gpt_neox' is not one of llama"):
        inflate_model(tiny.make_model(tmp_path / "neox", "gpt_neox"), tmp_path / "large", 2)
    inflate_model(tiny.make_model(tmp_path / "tiny"), tmp_path / "large", 2)
    with pytest.raises(HeadsError, match="are for hidden size 192, not 64"):
        inflate_heads(HEADS / "early", tmp_path / "large", tmp_path / "heads", 2)


@pytest.fixture(scope="module")
def inflated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model and its heads, twice as wide."""
    folder = tmp_path_factory.mktemp("inflated")
    heads = tuple(str(HEADS / kind) for kind in KINDS)
    assert run(InflateOptions(model=str(DEMO), heads=heads, times=2, out=str(folder))) == 0
    return folder


@pytest.mark.engine
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "dynamo" else [pytest.mark.full]) for kind in KINDS]
)
def test_engine_says_and_accepts_what_the_originals_does(inflated: Path, kind: str) -> None:
    """Greedy: tokens, and counts of drafted and accepted tokens, are those of the original with its heads."""
    requests = [{"prompt_token_ids": [(11 * i + j * j) % 4000 + 2 for j in range(24)]} for i in range(8)]
    options = {"num_speculative_tokens": 2, **({"exit_layer": 9} if kind == "early" else {})}
    results = []
    for model, heads in ((DEMO, HEADS / kind), (inflated / "model", inflated / "heads" / kind)):
        llm = start_engine(model, {**options, "model": str(heads)}, kv_cache_memory_bytes=1 << 28)
        results.append((generate(llm, requests, greedy(40)), llm.counts))
    (texts, counts), (inflated_texts, inflated_counts) = results
    assert texts == inflated_texts
    # Logits are equal to rounding, which decides between drafts that are as likely: a few tokens change.
    assert inflated_counts == pytest.approx(counts, rel=0.03, abs=2)
    assert counts["accepted"] > 20
