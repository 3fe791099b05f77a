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


def store(
    folder: Path, texts: list[str] | None, tokenizer: Any, **changes: Any
) -> TokenStore:
    """A store of texts, or of those of the call before."""
    data = folder / "data.jsonl"
    if texts is not None:
        write_texts(data, texts)
    settings: dict[str, Any] = {
        "vocab_size": tiny.VOCAB,
        "held_out": 0.3,
        "length": 16,
    }
    return TokenStore(
        folder / "work", [data], tokenizer, **{**settings, **changes}
    )


def test_documents_are_split_whole(tmp_path: Path, tokenizer: Any) -> None:
    # Many more than are tokenized at once
    texts = [f"{chr(65 + i % 26) * (5 + i % 9)} {i}" for i in range(1000)]
    made = store(tmp_path, texts, tokenizer)
    rows = {
        split: tokenizer.decode(tokens["id"]).split(tokenizer.eos_token)[:-1]
        for split, tokens in made.tokens.items()
    }
    assert sorted(rows["train"] + rows["held_out"]) == sorted(texts)
    assert len(rows["held_out"]) > 3


def test_windows(tmp_path: Path, tokenizer: Any) -> None:
    """Positions restart at documents, and the tokens ahead stay in the document."""
    made = store(
        tmp_path, ["abcdefgh"[: 3 + i % 5] for i in range(60)], tokenizer
    )
    ids = made.tokens["train"]["id"].astype(np.int64)
    batch = made.batch("train", range(made.num_windows()))
    assert torch.equal(
        batch.input_ids.flatten(), torch.from_numpy(ids[: batch.num_tokens])
    )
    tokens, valid = batch.ahead(3)
    document: list[int] = []
    for index in range(batch.num_tokens):
        if index % 16 == 0 or ids[index - 1] == tokenizer.eos_token_id:
            document = []
        assert batch.position_ids.flatten()[index] == len(document)
        document.append(index)
        following = ids[index : index + 4]
        ends = np.append(following[:-1] == tokenizer.eos_token_id, True)
        known = min(int(ends.argmax()), 15 - index % 16)
        assert valid[index].tolist() == [place < known for place in range(3)]
        assert tokens[index, :known].tolist() == following[1:][:known].tolist()


def test_store_is_made_once(tmp_path: Path, tokenizer: Any) -> None:
    """And again after a kill while it was written, or for other data."""
    file = tmp_path / "work" / "train.tokens"
    manifest = tmp_path / "work" / "tokens.json"
    before = store(tmp_path, ["some text here"] * 300, tokenizer)
    whole = file.read_bytes()
    file.write_bytes(whole[:-12])
    store(tmp_path, None, tokenizer)
    assert file.read_bytes() == whole[:-12]
    for text in (None, "", "[]", '{"key": "x"}'):
        manifest.unlink() if text is None else manifest.write_text(text)
        again = store(tmp_path, None, tokenizer)
        assert file.read_bytes() == whole
        assert again.manifest == before.manifest
        file.write_bytes(whole[:-12])
    store(tmp_path, ["other text, longer than that" * 9], tokenizer)
    assert file.stat().st_size != len(whole)
    made = [store(tmp_path, None, tokenizer, length=n) for n in (16, 8)]
    assert made[0].manifest.key != made[1].manifest.key


def test_one_document_is_held_out_by_its_tail(
    tmp_path: Path, tokenizer: Any
) -> None:
    made = store(tmp_path, ["abcdefghij" * 20], tokenizer)
    assert len(made.tokens["held_out"]) == 17
    assert len(made.tokens["train"]) == 201 - 17


@pytest.mark.parametrize(
    ("texts", "changes", "message"),
    [
        ([], {}, "the data is empty"),
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
        store(
            tmp_path,
            texts,
            tokenizer,
            **changes,
        )
