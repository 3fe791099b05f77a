# SPDX-License-Identifier: Apache-2.0
"""Files of `ppd data` as prompts: calibration answers what the records ask, whole."""

from pathlib import Path

import pytest
import torch
from conftest import Factory
from records import write

from vllm_ppd.heads.calibration.session import Calibration
from vllm_ppd.heads.calibration.text import generate, record_prompts
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.training.target import Target

PROMPTS = [[40 + i] * 3 + list(range(60, 60 + i)) for i in (4, 9, 1, 30, 6)]


def chats(path: Path) -> str:
    response = {"token_ids": list(range(100, 190)), "finish_reason": "length"}
    return write(path, *({"prompt_token_ids": ids, **response, "index": i} for i, ids in enumerate(PROMPTS)))


@pytest.fixture(scope="module")
def target(tiny_model: Factory) -> Target:
    return Target(str(tiny_model()), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("batch", [2, 32])
def test_calibration_answers_the_records_prompts(tmp_path: Path, target: Target, batch: int) -> None:
    """Beside longer ones, each is answered as it is alone, and in its place."""
    prompts = record_prompts([chats(tmp_path / "a.jsonl")], target, 4, longest=20)
    assert prompts is not None
    assert prompts.starts is not None
    short = [ids for ids in PROMPTS if len(ids) <= 20]
    assert [row[start:].tolist() for row, start in zip(prompts.ids, prompts.starts, strict=True)] == short
    together = generate(target, prompts.ids, 12, batch=batch, starts=prompts.starts)
    for row, ids in enumerate(short):
        alone = generate(target, torch.tensor([ids]), 12)
        assert torch.equal(together.generated[row, : together.lengths[row]], alone.generated[0, : alone.lengths[0]])


def test_prompts_that_are_too_few_or_not_the_models(tmp_path: Path, target: Target) -> None:
    path = chats(tmp_path / "a.jsonl")
    with pytest.raises(TrainingError, match="has 4 prompts of up to 20 tokens, but 5 are needed"):
        record_prompts([path], target, 5, longest=20)
    assert record_prompts([path, write(tmp_path / "b.jsonl", {"text": "some text"})], target, 6, longest=99) is None
    with pytest.raises(TrainingError, match="the data has token id 9999, but the model has 320"):
        record_prompts([write(tmp_path / "c.jsonl", {"prompt_token_ids": [9999]})], target, 1, longest=99)


def test_calibration_asks_for_them_first(tmp_path: Path, target: Target) -> None:
    class Options:
        data: tuple[str, ...] = (chats(tmp_path / "a.jsonl"),)
        prompts, prompt_tokens, new_tokens = 5, 8, 12

    made = Calibration.__new__(Calibration)
    made.options, made.target = Options(), target  # type: ignore[assignment]
    assert made.prompts.ids.shape == (5, 33)
    del made.prompts
    Options.data = (write(tmp_path / "b.jsonl", *[{"text": "abcdefghijklmnop"}] * 9),)
    assert made.prompts.ids.shape == (5, 8)
    assert made.prompts.starts is None
