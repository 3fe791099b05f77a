# SPDX-License-Identifier: Apache-2.0
"""Users' files: what is read and as what, what is skipped and counted, what is refused
in one line.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import DEMO
from records import templated, write
from tokenizers.processors import TemplateProcessing

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.prompts import document_prompts
from vllm_ppd.heads.data.special_tokens import SpecialTokens
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.vllm_plugins.cli.main import main

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
SYSTEM = {"role": "system", "content": "be"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "f"}}],
}
# As strict as Mistral's and Gemma's: users and assistants in turn, no system message.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ "
    "c.function.name }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOS = 5


@pytest.fixture(scope="module")
def chatty() -> Any:
    return templated(TEMPLATE)


def read(path: str | Path, tokenizer: Any) -> list[str]:
    return [document.text for document in Documents([path], lambda: tokenizer)]


def test_a_folder_of_files(tmp_path: Path, chatty: Any) -> None:
    write(tmp_path / "a.jsonl", {"text": "one"}, {"messages": CHAT})
    (tmp_path / "b.json").write_text('[{"text": "two"},\n {"text": "three"}]')
    (tmp_path / "c.py").write_text("x = 1\n" * 100_000)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"\0\1")
    texts = read(tmp_path, chatty)
    assert texts[:4] == ["one", "<user>hi<assistant>ho", "two", "three"]
    assert len(texts) > 5, "a long plain file comes in pieces"
    assert "".join(texts[4:]) == "x = 1\n" * 100_000


@pytest.mark.parametrize(
    ("record", "text", "prompt"),
    [
        ({"text": "x", "messages": None}, "x", None),
        (
            {"messages": CHAT, "text": None},
            "<user>hi<assistant>ho",
            "<user>hi<assistant>",
        ),
        (
            {"messages": [CHAT[0], CALL]},
            "<user>hi<assistant>[f]",
            "<user>hi<assistant>",
        ),
        ({"prompt": "a"}, "a", "a"),
        ({"prompt": "a", "response": " b"}, "a b", "a"),
        ({"prompt": "a", "completion": " b"}, "a b", "a"),
    ],
)
def test_forms_of_records(
    tmp_path: Path, chatty: Any, record: Any, text: str, prompt: str | None
) -> None:
    (document,) = Documents([write(tmp_path / "a.jsonl", record)], lambda: chatty)
    assert (document.text, document.prompt) == (text, prompt)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl:2 is not JSON"),
        ('{"text": "\xe9"}', "a.jsonl:2 is not JSON .not UTF-8"),
        ('{"a": ' + "[" * 100_000, "a.jsonl:2 is not JSON .nested too deeply"),
        (
            '{"question": "x", "chosen": "y"}',
            "a.jsonl:2 has 'chosen', 'question'; each record needs 'messages'",
        ),
        (
            '{"prompt": "x", "response": 3}',
            "a.jsonl:2: 'response' is of type int; it must be a string",
        ),
        ("[1]", "a.jsonl:2 is no JSON object"),
        ('{"text": 3}', "a.jsonl:2: 'text' is of type int"),
        (
            '{"messages": "hi"}',
            "a.jsonl:2: 'messages' must be a list of objects with 'role' and "
            "'content' strings",
        ),
        ('{"messages": [{"role": "user"}]}', "a.jsonl:2: 'messages' must be a list"),
        (
            '{"prompt_token_ids": [1, true]}',
            "a.jsonl:2: no list of token ids under 'prompt_token_ids'",
        ),
        (
            json.dumps({"messages": CHAT}),
            "a.jsonl:2 is a chat, but this model's tokenizer has no chat template",
        ),
        ('{"' + "x" * 1000 + '": 1}', "a.jsonl:2 has 'xxx"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n", encoding="latin-1")
    with pytest.raises(TrainingError, match=message) as caught:
        read(path, templated(None))
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"text": "a"},\n {"text" "b"}]', "a.json is not JSON .*line 2"),
        (
            "a.json",
            b'[{"text": "a"}, {"text": 3}]',
            "a.json, record 2: 'text' is of type int",
        ),
        ("a.txt", b"one\n\xff\n", "a.txt is not UTF-8 text; convert the file"),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TrainingError, match=message):
        read(tmp_path / name, templated(None))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a\ud800b"}, "a lone surrogate in the text"),
        (
            {"messages": [SYSTEM, *CHAT]},
            "the chat template rejects it (System role not supported)",
        ),
        ({"messages": []}, "a chat without messages"),
        ({"text": None}, "the text is null"),
        ({"prompt_token_ids": []}, "the text is empty"),
    ],
)
def test_records_that_are_skipped_are_counted(
    tmp_path: Path, chatty: Any, capsys: Any, record: Any, reason: str
) -> None:
    made = Documents(
        [write(tmp_path / "a.jsonl", {"text": "fine"}, record, record)], lambda: chatty
    )
    assert [document.text for document in made] == ["fine"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm-ppd: skipped 2: 2 {reason}") and line.endswith(
        ", of 3 records"
    )


def test_special_tokens_are_those_of_served_prompts(tmp_path: Path) -> None:
    """One BOS at the beginning, whether of a text, of a piece of it, or of a chat whose
    template writes it.
    """
    tokenizer = tiny.make_tokenizer()
    token = tokenizer.convert_ids_to_tokens(BOS)
    special = TemplateProcessing(single=f"{token} $A", special_tokens=[(token, BOS)])
    tokenizer.backend_tokenizer.post_processor = special
    tokenizer.chat_template = token + TEMPLATE
    assert SpecialTokens.of(tokenizer) == ((BOS,), ())
    path = write(tmp_path / "a.jsonl", {"text": "some longer text"}, {"messages": CHAT})
    documents = Documents([path], lambda: tokenizer)
    served = [
        tokenizer("some longer text")["input_ids"],
        tokenizer(
            tokenizer.apply_chat_template(CHAT, tokenize=False),
            add_special_tokens=False,
        )["input_ids"],
    ]
    assert [document.ids for document in documents.tokens()] == served
    pieces, chat = document_prompts(documents, 5)
    assert not pieces.is_asked and chat.is_asked and len(pieces.ids) > 1
    assert all(
        ids[0] == BOS and BOS not in ids[1:] and len(ids) == 5 for ids in pieces.ids
    )
    asked = tokenizer.apply_chat_template(
        CHAT[:1], tokenize=False, add_generation_prompt=True
    )
    assert chat.ids == [tokenizer(asked, add_special_tokens=False)["input_ids"]]


BAD: dict[str, tuple[str, str | None, str]] = {
    "no file": ("none.jsonl", None, "data file 'none.jsonl' does not exist"),
    "a pipe": ("pipe", None, "data file 'pipe' is not a regular file"),
    "no text": (
        "a.jsonl",
        '\n{"text": null}\n',
        "no text in a.jsonl (a.jsonl:2: the text is null); give .jsonl",
    ),
    "no JSON": ("a.jsonl", '{"text": "a"}\n{', "a.jsonl:2 is not JSON"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("command", ["train early", "calibrate", "data"])
def test_commands_refuse_bad_data_before_a_model_is_loaded(
    command: str, bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    for loader in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(f"transformers.{loader}.from_pretrained", load)
    monkeypatch.chdir(tmp_path)
    name, content, message = BAD[bad]
    if content is not None:
        Path(name).write_text(content)
    elif bad == "a pipe":
        os.mkfifo(name)
    words = {
        "train early": ["--model", str(DEMO), "--out", "out", "--data", name],
        "calibrate": [str(DEMO.parent / "heads" / "early"), "--data", name],
        "data": ["--model", str(DEMO), "--out", "out", "--prompts", name],
    }[command]
    assert main([*command.split(), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ppd: error: {message}") and not Path("out").exists()


def test_too_few_prompts_are_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    ids = {"prompt_token_ids": [4, 5]}
    text = {"text": "has any number of prompts"}
    data = write(tmp_path / "a.jsonl", ids, {"prompt": "x"})
    check_data([data], prompts=2)
    with pytest.raises(
        TrainingError,
        match=r"3 prompts are needed, but .*a\.jsonl have 2; give more data",
    ):
        check_data([data], prompts=3)
    check_data([data, write(tmp_path / "b.jsonl", text)], prompts=3)
