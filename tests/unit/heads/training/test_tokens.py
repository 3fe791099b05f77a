# SPDX-License-Identifier: Apache-2.0
"""From files to packed windows: what is read, what is refused, and that packed
documents do not see each other.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import write_texts

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.training.tokens import TokenStore


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.make_tokenizer()


def store(folder: Path, texts: list[str], tokenizer: Any, **changes: Any) -> TokenStore:
    folder.mkdir(exist_ok=True)
    data = write_texts(folder / "data.jsonl", texts)
    settings: dict[str, Any] = {"vocab_size": tiny.VOCAB, "held_out": 0.3, "length": 16}
    return TokenStore(folder / "work", [data], tokenizer, **{**settings, **changes})


def test_documents_are_split_whole(tmp_path: Path, tokenizer: Any) -> None:
    # Many more than are tokenised at once
    texts = [f"{chr(65 + i % 26) * (5 + i % 9)} {i}" for i in range(1000)]
    made = store(tmp_path, texts, tokenizer)
    rows = {
        split: [tokenizer.decode(row[:-1]) for row in made.documents(split)]
        for split in ("train", "held_out")
    }
    assert sorted(rows["train"] + rows["held_out"]) == sorted(texts)
    assert len(rows["held_out"]) > 3


def test_windows_restart_positions_at_documents(tmp_path: Path, tokenizer: Any) -> None:
    texts = ["abcdefgh"[: 3 + i % 5] for i in range(60)]
    made = store(tmp_path, texts, tokenizer)
    tokens = made.tokens["train"]["id"]
    batch = made.batch("train", range(made.num_windows()))
    assert torch.equal(
        batch.input_ids.flatten(),
        torch.from_numpy(tokens[: batch.num_tokens].astype(np.int64)),
    )
    expected = []
    position = 0
    for index, token in enumerate(tokens[: batch.num_tokens]):
        position = 0 if index % 16 == 0 else position
        expected.append(position)
        position = 0 if token == tokenizer.eos_token_id else position + 1
    assert batch.position_ids.flatten().tolist() == expected


def test_tokens_ahead_stay_in_the_document(tmp_path: Path, tokenizer: Any) -> None:
    made = store(tmp_path, ["abcdefgh"[: 3 + i % 5] for i in range(60)], tokenizer)
    batch = made.batch("train", [0, 2])
    tokens, valid = batch.ahead(3)
    for window in range(2):
        ids = batch.input_ids[window].tolist()
        positions = batch.position_ids[window].tolist()
        for t in range(16):
            row = 16 * window + t
            inside = t + 3 < 16 and all(
                positions[t + i] == positions[t] + i for i in (1, 2, 3)
            )
            assert bool(valid[row]) == inside
            if inside:
                assert tokens[row].tolist() == ids[t + 1 : t + 4]


def test_store_is_made_once(tmp_path: Path, tokenizer: Any) -> None:
    first = store(tmp_path, ["some text here"] * 20, tokenizer)
    stamp = (tmp_path / "work" / "train.tokens").stat().st_mtime_ns
    TokenStore(
        tmp_path / "work", [tmp_path / "data.jsonl"], tokenizer, tiny.VOCAB, 0.3, 16
    )
    assert (tmp_path / "work" / "train.tokens").stat().st_mtime_ns == stamp
    write_texts(tmp_path / "data.jsonl", ["other text, longer than that" * 9])
    other = TokenStore(
        tmp_path / "work", [tmp_path / "data.jsonl"], tokenizer, tiny.VOCAB, 0.3, 16
    )
    assert len(other.tokens["train"]) != len(first.tokens["train"])


def test_one_document_is_held_out_by_its_tail(tmp_path: Path, tokenizer: Any) -> None:
    made = store(tmp_path, ["abcdefghij" * 20], tokenizer)
    assert len(made.tokens["held_out"]) == 17
    assert len(made.tokens["train"]) == 201 - 17


@pytest.mark.parametrize(
    ("texts", "changes", "message"),
    [
        ([], {}, "the data is empty"),
        (
            [""],
            {},
            "the data is empty .1 files, no text; skipped 1: 1 the text is empty",
        ),
        (["short"], {}, "tokens, but a window needs 16"),
        (
            ["some text"] * 9,
            {"vocab_size": 50},
            "the data has token id .*, but the model has 50 tokens",
        ),
    ],
)
def test_bad_data(
    tmp_path: Path, tokenizer: Any, texts: list[str], changes: dict, message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        store(tmp_path, texts, tokenizer, **changes)


@pytest.mark.parametrize("text", [None, "", "[]", '{"key": "x"}'])
def test_tokens_without_a_manifest_are_made_again(
    tmp_path: Path, tokenizer: Any, text: str | None
) -> None:
    """As after a kill while they were written."""
    texts = [f"{chr(65 + i % 26) * (5 + i % 9)} {i}" for i in range(300)]
    before = store(tmp_path, texts, tokenizer)
    manifest = tmp_path / "work" / "tokens.json"
    tokens = tmp_path / "work" / "train.tokens"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:100])
    manifest.unlink() if text is None else manifest.write_text(text)
    again = store(tmp_path, texts, tokenizer)
    assert tokens.read_bytes() == whole
    assert again.manifest.documents == before.manifest.documents == 300
