# SPDX-License-Identifier: Apache-2.0
"""Data files damaged at random, by rules: each ends in texts with counted skips, or in one line with file and line."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
from records import templated

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.training.tokens import TokenStore

pytestmark = pytest.mark.usefixtures("bounded")
SEEDS = range(12)  # of a hundred files each
TEMPLATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Alternate') }}"
    "{% endif %}<{{ m.role }}>{{ m.content + '' }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
    "{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
RECORDS: list[dict[str, Any]] = [
    {"text": "plain text, \u00e9 and \U0001f600"},
    {"text": None, "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "completion": "b"},
    {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
    {"prompt_token_ids": [1, 2, 3]},
]
ODD: list[Any] = [
    None, True, 3, -1, 10**400, 1e308, float("nan"), float("inf"), "", "\ud800", "\x00", "x" * 3000, [], {}, [[]],
    [None], [3], {"a": 1}, ["text"], [{"type": "image_url"}], [{"role": "user"}], [{"role": "system", "content": "s"}],
    {"role": "user", "content": "c"}, [{"from": "gpt", "value": "g"}] * 2,
]  # fmt: skip
FRAGMENTS = [
    b"\xff", b"\xfe\xff", b"\x00", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\n", b"\r", b"\\", b'"', b"{", b"}", b"[", b"]",
    b",", b"NaN", b"null", b"\\ud800", b"1" * 5000, b"[" * 3000, b'{"a":' * 3000, b"\xe2\x80\xa8", b"\x1f\x8b",
]  # fmt: skip


def replaced(value: Any, rng: random.Random) -> Any:
    """A copy with one value at any depth exchanged, left out or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        how = rng.random()
        if how < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if how < 0.2:
            return {rng.choice(["txt", "", "k" * 2000, "text", "messages", "role"]) if k == key else k: v
                    for k, v in value.items()}  # fmt: skip
        return {**value, key: replaced(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], replaced(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, put in, doubled, or in another encoding."""
    at, to = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice([
        lambda: data[:at],
        lambda: data[:at] + data[to:],
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + rng.choice(FRAGMENTS) + data[at:],
        lambda: data[:to] + data[at:],
        lambda: data.decode(errors="replace").encode("utf-16"),
        lambda: data.decode(errors="replace").encode("utf-8-sig"),
        lambda: data.decode(errors="replace").encode("latin-1", "replace"),
        lambda: data.replace(b"\n", b"\r\n"),
    ])()  # fmt: skip


def odd_file(folder: Path, rng: random.Random) -> Path:
    suffix = rng.choice([".jsonl", ".jsonl", ".json", ".ndjson", ".txt"])
    records = [rng.choice(RECORDS) for _ in range(rng.randrange(1, 6))]
    if rng.random() < 0.7:
        at = rng.randrange(len(records))
        records[at] = replaced(records[at], rng)
    ascii_only = rng.random() < 0.5 or any("\\ud800" in json.dumps(record) for record in records)
    lines = [json.dumps(record, ensure_ascii=ascii_only) for record in records]
    text = "[" + ",\n".join(lines) + "]" if suffix == ".json" and rng.random() < 0.7 else "\n".join(lines)
    data = text.encode()
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        data = damaged(data, rng)
    path = folder / f"data{suffix}"
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return templated(TEMPLATE)


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_data(tmp_path: Path, tokenizer: Any, capsys: Any, seed: int) -> None:
    rng = random.Random(seed)
    endings = {"texts": 0, "skips": 0, "errors": 0}
    for _ in range(100):
        path = odd_file(tmp_path, rng)
        try:
            made = Documents([path], lambda: tokenizer)
            documents = list(made.token_ids())
        except TrainingError as error:
            endings["errors"] += 1
            assert re.search(r"data\.\w+(:|, record )\d+", str(error)), error
            assert len(str(error)) <= 300
            assert "\n" not in str(error)
            documents = []
        else:
            endings["skips" if made.skipped else "texts"] += 1
            assert made.count == len(documents)
            assert made.count or made.skipped, path.read_bytes()
            told = capsys.readouterr().err.splitlines()
            assert len(told) == len(made.skipped) + (made.skipped.total() > len(made.skipped))
        assert all(type(token) is int for ids in documents for token in ids)
        if not any(documents) or endings["texts"] % 5 == 0:
            try:
                store = TokenStore(tmp_path / "work", [path], tokenizer, tiny.VOCAB, 0.3, 4)
            except TrainingError as error:
                assert len(str(error)) <= 300
            else:
                assert documents
                assert len(store.tokens["train"]) > 4
            capsys.readouterr()
        path.unlink()
    assert min(endings.values()) > 0, endings
