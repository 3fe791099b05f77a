# SPDX-License-Identifier: Apache-2.0
"""An EAGLE head of the demo model: what is trained is what vLLM runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import generate, greedy
from conftest import DEMO, start_engine, write_texts

from vllm_ppd.benchmarks.models.__main__ import COMMANDS
from vllm_ppd.benchmarks.models.corpus import split
from vllm_ppd.benchmarks.models.eagle import Eagle, EagleOptions
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.vllm_plugins.cli.main import main


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few files of the corpus."""
    return write_texts(tmp_path_factory.mktemp("data") / "train.jsonl", split()[0][:60])


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(str(DEMO), torch.device("cpu"), torch.float32, False)


def eagle_of(target: Target) -> Eagle:
    torch.manual_seed(0)
    return Eagle(EagleOptions(model=str(DEMO), data=["-"], out="-"), target).eval()


@torch.no_grad()
def test_drafts_are_those_of_a_chain(target: Target) -> None:
    """Every start at once predicts what an engine does that appends a draft's state to the target's."""
    eagle = eagle_of(target)
    lengths = (9, 11)  # of two documents in a window
    batch = Batch(torch.randint(2, 4000, (1, 20)), torch.cat([torch.arange(n) for n in lengths])[None])
    hidden = eagle.final_states(batch)
    chains = eagle.predicted(batch, hidden, 3)
    for begin, start in ((0, 5), (9, 9), (9, 14)):  # the document's first token, and the token whose state is read
        states = hidden[:, begin : start + 1]
        for draft, predicted in enumerate(chains):
            tokens = Batch(batch.input_ids[:, begin : start + draft + 2], torch.arange(states.shape[1] + 1)[None])
            last = eagle.predicted(tokens, states)[0][:, -1:]
            torch.testing.assert_close(predicted[:, start : start + 1], last, rtol=1e-4, atol=1e-4)
            states = torch.cat([states, last], dim=1)


@torch.no_grad()
def test_accepted_drafts_are_counted_up_to_the_first_wrong_one(target: Target) -> None:
    eagle = eagle_of(target)
    batch = Batch(torch.randint(2, 4000, (1, 12)), torch.arange(12)[None])
    final = eagle.final_states(batch)
    drafted = torch.stack([eagle.likeliest(final)[0].roll(-draft) for draft in (1, 2, 3)], dim=1)
    assert eagle.accepted(batch, final, drafted)["accepted"].tolist() == [8, 8, 8]  # of 12 starts those with 4 tokens
    drafted[2, 1] += 1
    drafted[5, 0] += 1
    counts = eagle.accepted(batch, final, drafted)
    assert counts["accepted"].tolist() == [7, 6, 6] and int(counts["accepted_of"]) == 8
    assert set(eagle.loss(batch)[1]) >= {"accepted", "accepted_of"} and "accepted" not in eagle.train().loss(batch)[1]


@pytest.mark.full
@pytest.mark.engine
def test_a_head_drafts_in_vllm(data: Path, tmp_path: Path) -> None:
    """A few steps of training already get drafts accepted; greedy tokens are those without speculation."""
    trained = ("--model", str(DEMO), "--data", str(data), "--out", str(tmp_path), "--evaluation-tokens", "4096")
    steps = ("--steps", "64", "--batch-size", "4", "--sequence-length", "256")
    assert main(["eagle", *steps, *trained], COMMANDS, "models") == 0
    facts = json.loads((tmp_path / "provenance.json").read_text())
    assert facts["held_out_after"]["accepted_a_step"] > max(0.02, facts["held_out_before"]["accepted_a_step"])
    requests = [{"prompt_token_ids": [(11 * i + j * j) % 4000 + 2 for j in range(24)]} for i in range(8)]
    plain = generate(start_engine(DEMO, None, kv_cache_memory_bytes=1 << 28), requests, greedy(40))
    config: dict[str, Any] = {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 3}
    llm = start_engine(DEMO, config, kv_cache_memory_bytes=1 << 28)
    assert generate(llm, requests, greedy(40)) == plain
    assert llm.counts["accepted"] > 0
