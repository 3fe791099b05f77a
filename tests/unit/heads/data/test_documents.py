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

from vllm_ppd.heads.data.documents import Documents, document_prompts
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


def read(
    path: str | Path,
    tokenizer: Any,
) -> list[str]:
    return [document.text for document in Documents([path], tokenizer)]


def test_a_folder_of_files(
    tmp_path: Path,
    chatty: Any,
) -> None:
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
    ],
)
def test_forms_of_records(
    tmp_path: Path, chatty: Any, record: Any, text: str, prompt: str | None
) -> None:
    (document,) = Documents([write(tmp_path / "a.jsonl", record)], chatty)
    assert (document.text, document.prompt) == (text, prompt)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{", "a.jsonl:2 is not JSON"),
        ("a.jsonl", '{"text": "\xe9"}', "a.jsonl:2 is not JSON .*utf-8"),
        ("a.jsonl", '{"a": ' + "[" * 100_000, ":2 is not JSON .*recursion"),
        (
            "a.jsonl",
            '{"question": "x", "chosen": "y"}',
            "a.jsonl:2 has 'chosen', 'question'; each record needs 'messages'",
        ),
        (
            "a.jsonl",
            '{"prompt": "x", "response": 3}',
            "a.jsonl:2: 'response' is of type int; it must be a string",
        ),
        ("a.jsonl", "[1]", "a.jsonl:2 is no JSON object"),
        (
            "a.jsonl",
            '{"messages": [{"role": "user"}]}',
            "a.jsonl:2: 'messages' must be a list of objects with 'role' and "
            "'content' strings",
        ),
        (
            "a.jsonl",
            '{"prompt_token_ids": [1, true]}',
            "a.jsonl:2: no list of token ids under 'prompt_token_ids'",
        ),
        (
            "a.jsonl",
            json.dumps({"messages": CHAT}),
            "a.jsonl:2 is a chat, but this model's tokenizer has no chat template",
        ),
        ("a.jsonl", '{"' + "x" * 1000 + '": 1}', "a.jsonl:2 has 'xxx"),
        (
            "a.json",
            '[{"text": "a"},\n {"text" "b"}]',
            "a.json is not JSON .*line 3",
        ),
        ("a.json", '{"text": 3}', "a.json, record 1: 'text' is of type int"),
        ("a.txt", "\xff", "a.txt is not UTF-8 text; convert the file"),
    ],
)
def test_bad_data_is_named(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    first = "\n" if name == "a.json" else '{"text": "fine"}\n'
    (tmp_path / name).write_text(first + content + "\n", encoding="latin-1")
    with pytest.raises(TrainingError, match=message) as caught:
        read(tmp_path / name, templated(None))
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300


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
    path = write(
        tmp_path / "a.jsonl",
        {"text": "fine"},
        record,
        record,
    )
    assert read(path, chatty) == ["fine"]
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
    special = TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, BOS)]
    )
    tokenizer.backend_tokenizer.post_processor = special
    tokenizer.chat_template = token + TEMPLATE
    path = write(
        tmp_path / "a.jsonl", {"text": "some longer text"}, {"messages": CHAT}
    )
    documents = Documents([path], tokenizer)

    def rendered(messages: Any, **settings: Any) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    whole = tokenizer("some longer text")["input_ids"]
    assert [document.ids for document in documents.tokens()] == [
        whole,
        rendered(CHAT),
    ]
    (_, pieces), (_, chat) = document_prompts(documents, 5)
    body = whole[1:]
    assert pieces == [[BOS, *body[i : i + 4]] for i in range(0, len(body) - 3, 4)]
    assert chat == [rendered(CHAT[:1], add_generation_prompt=True)]


BAD: list[tuple[str, str | None, str]] = [
    ("none.jsonl", None, "data file 'none.jsonl' does not exist"),
    ("pipe", None, "data file 'pipe' is not a regular file"),
    (
        "a.jsonl",
        '\n{"text": null}\n',
        "no text in a.jsonl (a.jsonl:2: the text is null); pass .jsonl",
    ),
    ("a.jsonl", '{"text": "a"}\n{', "a.jsonl:2 is not JSON"),
]


COMMANDS = (
    f"train early --model {DEMO} --out out --data",
    f"calibrate {DEMO.parent}/heads/early --data",
    f"data --model {DEMO} --out out --prompts",
)


@pytest.mark.parametrize(("name", "content", "message"), BAD)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_bad_data_before_a_model_is_loaded(
    command: str,
    name: str,
    content: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    for loader in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(f"transformers.{loader}.from_pretrained", load)
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_text(content)
    elif name == "pipe":
        os.mkfifo(name)
    assert main([*command.split(), name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ppd: error: {message}") and not Path("out").exists()
