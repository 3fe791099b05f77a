# SPDX-License-Identifier: Apache-2.0
"""Users' files: what is read and as what, what is skipped and counted, what is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import write_texts
from records import templated, write
from tokenizers.processors import TemplateProcessing

from vllm_ppd.benchmarks.prompts import read_prompts
from vllm_ppd.heads.calibration.text import take_prompts
from vllm_ppd.heads.data import documents as documents_module
from vllm_ppd.heads.data import files
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.special_tokens import SpecialTokens
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.generation.options import DataOptions
from vllm_ppd.heads.generation.prompts import read_prompts as data_prompts
from vllm_ppd.heads.training.tokens import TokenStore

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
SYSTEM = {"role": "system", "content": "be"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
# As strict as Mistral's and Gemma's: users and assistants in turn, no system message.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.x }}]"
    "{% endfor %}{% endfor %}"
)
BOS = 5


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny.make_tokenizer()


@pytest.fixture(scope="module")
def chatty() -> Any:
    return templated(TEMPLATE)


def with_bos() -> Any:
    """A tokenizer that begins what vLLM's server reads with a BOS token; so does its chat template."""
    tokenizer = tiny.make_tokenizer()
    token = tokenizer.convert_ids_to_tokens(BOS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{token} $A", special_tokens=[(token, BOS)])
    tokenizer.chat_template = token + TEMPLATE
    return tokenizer


def read(path: Path, tokenizer: Any) -> list[str]:
    return [document.text for document in Documents([path], lambda: tokenizer)]


def test_text_chat_and_plain_files(tmp_path: Path, chatty: Any) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\n\n" + json.dumps({"messages": CHAT}) + "\n")
    (tmp_path / "b.py").write_text("x = 1\n" * 100_000)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"\0\1")
    texts = read(tmp_path, chatty)
    assert texts[:2] == ["one", "<user>hi<assistant>ho"]
    assert len(texts) > 3, "a long plain file comes in pieces"
    assert "".join(texts[2:]) == "x = 1\n" * 100_000


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"text": None, "messages": CHAT}, "<user>hi<assistant>ho"),
        ({"text": float("nan"), "messages": CHAT}, "<user>hi<assistant>ho"),
        ({"text": "x", "messages": None}, "x"),
        ({"messages": [CHAT[0], CALLING | {"content": None}]}, "<user>hi<assistant>[f 1]"),
        ({"messages": [CHAT[0], CALLING]}, "<user>hi<assistant>[f 1]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]}, "<user>a\nb"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "<user>a<assistant>b"),
        ({"conversations": [{"role": None, "content": None, "from": "human", "value": "a"}]}, "<user>a"),
        ({"conversations": CHAT}, "<user>hi<assistant>ho"),
        ({"prompt": "a", "completion": " b"}, "a b"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "<user>hi<assistant>ho"),
        ({"prompt": "hi", "completion": CHAT[1:]}, "<user>hi<assistant>ho"),
        ({"text": "\ud83d\ude00"}, "\U0001f600"),
    ],
)  # fmt: skip
def test_layouts_of_records(tmp_path: Path, chatty: Any, record: Any, text: str) -> None:
    assert read(write(tmp_path / "a.jsonl", record), chatty) == [text]


def test_system_column(tmp_path: Path) -> None:
    tokenizer = templated("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    path = write(tmp_path / "a.jsonl", {"system": "be", "conversations": [{"from": "human", "value": "a"}]})
    assert read(path, tokenizer) == ["<system>be<user>a"]


@pytest.mark.parametrize(
    "text",
    [
        '[{"text": "a"},\n {"text": "b"}]',
        '[{"text": "a"},\n {"text": "b"}]\n\n',
        '{"text": "a"}\n{"text": "b"}\n',
        '{\n "text": "a"\n}{"text": "b"}',
        '\ufeff[{"text": "a"}, {"text": "b"}]',
        "[" + " " * 50 + '{"text": "a"}\n' + " " * 50 + "," + '{"text": "b"}' + " " * 50 + "]",
    ],
)
def test_json_files_are_records(tmp_path: Path, plain: Any, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert read(tmp_path / "a.json", plain) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"},\n {"text": 3}]', "a.json, record 2: 'text' is of type int"),
        ('[{"text": "a"}\n\n {"text": "b"}]', "a.json:3 is not JSON .Expecting ',' delimiter"),
        ('[{"text": "a"},\n\n {"text" "b"}]', "a.json:3 is not JSON .Expecting ':'"),
        ('[{"text": "a"},\n', "a.json:2 is not JSON .Expecting value"),
        ('[{"text": "a"}\n', "a.json:2 is not JSON .Expecting ',' delimiter"),
        ('[{"text": "a"}]\nx', "a.json:2 is not JSON .Expecting value"),
        ('"text"', "a.json, record 1 has no columns"),
        ("[" * 100_000, "a.json:1 is not JSON .nested too deeply"),
        ('[{"id": ' + "1" * 5000 + "}]", "a.json:1 is not JSON .Exceeds the limit"),
        ('{"data": [{"text": "a"}]}', "a.json, record 1 has 'data'; each record needs 'text'"),
    ],
)
def test_bad_json_file_is_named(tmp_path: Path, plain: Any, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(TrainingError, match=message) as caught:
        read(tmp_path / "a.json", plain)
    assert len(str(caught.value)) <= 300


def test_byte_order_marks(tmp_path: Path, plain: Any) -> None:
    record = json.dumps({"text": "a"}) + "\n"
    (tmp_path / "a.jsonl").write_text("\ufeff" + record + "\ufeff" + record)
    (tmp_path / "b.txt").write_text("\ufeffb")
    assert read(tmp_path, plain) == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a\ud800b"}, "a lone surrogate in the text, which is not a Unicode character"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "a lone surrogate in the text"),
        ({"messages": CHAT[1:]}, "the chat template rejects it (Roles must alternate)"),
        ({"messages": [SYSTEM, *CHAT]}, "the chat template rejects it (System role not supported)"),
        ({"messages": [CHAT[0], {**CHAT[1], "tool_calls": [3]}]}, "the chat template rejects it ("),
        ({"messages": []}, "a chat without messages"),
        ({"messages": [{"role": "user", "content": None}]}, "a message without content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a message with content that is not text"),
        ({"text": None}, "the text is null"),
        ({"prompt": "x", "completion": None}, "the text is null"),
        ({"text": ""}, "the text is empty"),
        ({"prompt_token_ids": []}, "the text is empty"),
    ],
)  # fmt: skip
def test_skipped_records_are_counted(tmp_path: Path, chatty: Any, capsys: Any, record: Any, reason: str) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "fine"}, record, record)
    made = Documents([path], lambda: chatty)
    assert [document.text for document in made] == ["fine"]
    assert list(made.skipped.values()) == [2]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[0].startswith("vllm-ppd: skipped ")
    assert f"a.jsonl:2: {reason}" in told[0]
    assert f"skipped 2: 2 {reason}" in told[1]
    assert told[1].endswith(", of 3 records")


def test_many_reasons(tmp_path: Path, capsys: Any) -> None:
    """A template may name what it refuses; what is told stays short."""
    tokenizer = templated("{{ raise_exception(messages[0].content) }}")
    texts = [f"{i} {'x' * 500}" for i in range(40)]
    made = Documents(
        [write(tmp_path / "a.jsonl", *({"messages": [{"role": "user", "content": text}]} for text in texts))],
        lambda: tokenizer,
    )
    assert not list(made)
    assert made.skipped.total() == 40
    assert made.skipped[documents_module.OTHER] == 40 - documents_module.MOST_REASONS
    told = capsys.readouterr().err.splitlines()
    assert len(told) == documents_module.MOST_REASONS + 2
    assert max(map(len, told)) <= 300


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl:2 is not JSON"),
        ('{"question": "x", "chosen": "y"}', "a.jsonl:2 has 'chosen', 'question'; each record needs 'text'"),
        ('{"prompt": "x", "completion": 3}', "a.jsonl:2: 'completion' is of type int"),
        ("[1]", "a.jsonl:2 has no columns"),
        ('{"text": 3}', "a.jsonl:2: 'text' is of type int"),
        ('{"messages": "hi"}', "a.jsonl:2: 'messages' must be a list"),
        ('{"messages": [{"role": "user"}]}', "a.jsonl:2: 'messages' must be a list"),
        ('{"messages": [{"role": 3, "content": "x"}]}', "a.jsonl:2: 'messages' must be a list"),
        ('{"conversations": [["hi"]]}', "a.jsonl:2: 'conversations' must be a list"),
        ('{"messages": [{"role": "user", "content": {"a": 1}}]}', "a.jsonl:2: a message's content is of type dict"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "a.jsonl:2: a content part of a message"),
        ('{"prompt_token_ids": [1, -1]}', "a.jsonl:2: no list of token ids"),
        ('{"prompt_token_ids": [1, true]}', "a.jsonl:2: no list of token ids"),
        (json.dumps({"messages": CHAT}), "a.jsonl:2 is a chat, but this model's tokenizer has no chat template"),
        ('{"' + "x" * 1000 + '": 1}', "a.jsonl:2 has 'xxx"),
        ('{"a": ' + "[" * 100_000, "a.jsonl:2 is not JSON .nested too deeply"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, plain: Any, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(TrainingError, match=message) as caught:
        read(path, plain)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 300


def test_bad_files(tmp_path: Path, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match="does not exist"):
        read(tmp_path / "none.jsonl", plain)
    (tmp_path / ".hidden").write_text("x")
    with pytest.raises(TrainingError, match="holds no files"):
        read(tmp_path, plain)
    for name, content, message in (
        ("a.txt", b"\xff\xfe\x00", r"a.txt:1 is not UTF-8 text"),
        ("b.txt", b"one\ntwo\n\xff\n", r"b.txt:3 is not UTF-8 text; convert"),
        ("c.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"c.jsonl:2 is not UTF-8 text"),
        ("d.json", b'[{"text": "a"},\n{"text": "\xe9"}]\n', r"d.json:2 is not UTF-8 text"),
        ("e.txt", b"one\n\xe2\x82", r"e.txt:2 is not UTF-8 text"),
        (
            "f.jsonl.gz",
            b"\x1f\x8b\x08\x00",
            r"f.jsonl.gz:1 is not UTF-8 text; convert the file, unpack it",
        ),
        ("g.bin", b"line\n\x00\x01", r"g.bin:2 is not UTF-8 text"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TrainingError, match=message) as caught:
            read(tmp_path / name, plain)
        assert len(str(caught.value)) <= 300
    monkeypatch.setattr(files, "LONGEST_RECORD", 50)
    with pytest.raises(TrainingError, match=r"i.jsonl:2 is longer than 50 characters"):
        read(write_texts(tmp_path / "i.jsonl", ["a", "b" * 60]), plain)


def test_files_without_text_are_counted(tmp_path: Path, plain: Any) -> None:
    for name, content in (("a.jsonl", ""), ("b.jsonl", "\n \n"), ("c.txt", ""), ("d.json", "[]"), ("e.txt", "\ufeff")):
        (tmp_path / name).write_text(content)
    made = Documents([tmp_path], lambda: plain)
    assert not list(made)
    assert made.skipped == {"an empty file": 5}


def test_special_tokens() -> None:
    tokenizer = with_bos()
    special = SpecialTokens.of(tokenizer)
    assert special == ((BOS,), ())
    assert SpecialTokens.of(tiny.make_tokenizer()) == ((), ())
    assert special.pieces([BOS, 10, 11, 12, 13, 14], 3) == [[BOS, 10, 11], [BOS, 12, 13]]
    assert special.pieces([10, 11, 12, 13], 3) == [[10, 11, 12]]  # a chat whose template has no BOS
    assert special.pieces([BOS, 10], 3) == []
    assert special.pieces([BOS, 10], 3, shorter=True) == [[BOS, 10]]
    assert special.bare([BOS, 10]) == [10]


def test_documents_and_prompts_begin_as_served_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, calibration, on-policy prompts and benchmarks: one BOS at the beginning, as vLLM's server has it."""
    tokenizer = with_bos()
    served = tokenizer("some text", add_special_tokens=True)["input_ids"]  # of a completion's prompt
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False)
    served_chat = tokenizer(chat, add_special_tokens=False)["input_ids"]  # of a chat
    assert served[0] == served_chat[0] == BOS != served_chat[1]
    data = write(tmp_path / "data.jsonl", *[{"text": "some text"}, {"messages": CHAT}] * 30)
    store = TokenStore(tmp_path / "work", [data], tokenizer, tiny.VOCAB, 0.3, 16)
    for document in store.documents():
        assert document.tolist() in ([*served, 0], [*served_chat, 0])

    class Target:
        vocab_size, device = tiny.VOCAB, "cpu"

    Target.tokenizer = tokenizer  # type: ignore[attr-defined]
    prompts = take_prompts([str(data)], Target, 90, 5).tolist()  # type: ignore[arg-type]
    assert served[:5] in prompts
    assert [BOS, *served[5:9]] in prompts
    assert all(ids[0] == BOS and BOS not in ids[1:] for ids in prompts)

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: tokenizer)
    prompts = [prompt.ids for prompt in read_prompts((str(data),), "any", 5)]
    assert served[:5] in prompts
    assert all(ids[0] == BOS and BOS not in ids[1:] for ids in prompts)

    options = DataOptions(model="any", out="-", prompts=(str(data),), prompt_tokens=5)
    asked = list(data_prompts(options, tokenizer))
    assert served[:5] in asked
    user = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer(user, add_special_tokens=False)["input_ids"] in asked
    assert all(ids[0] == BOS and BOS not in ids[1:] for ids in asked)
