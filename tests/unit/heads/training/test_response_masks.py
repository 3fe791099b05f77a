# SPDX-License-Identifier: Apache-2.0
"""Prompts are left out of the loss: what of a record is a response, and what each kind
of heads makes of it.
"""

import itertools
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import Factory
from overfitted import untrained
from records import templated, write

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.training.tokens import Batch, TokenStore

# As most are: a token ends each turn, and a line break follows it.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Leaves the reasoning out of all turns but the last.
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and "
    "loop.last %}so: {% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Begins the reasoning in the prompt, and leaves it out of every turn.
OPENING = (
    "{% for m in messages %}<{{ m.role }}>{{ "
    "m.content.split('</think>')[-1] }}{% if m.role == 'assistant' %}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
# As Qwen3's: the reasoning is left out of all turns before the last question, and an
# answer without any gets an empty one.
QWEN3 = (
    "{% set seen = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set seen.asked = loop.index %}{% endif %}{% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{% set parts = m.content.split('</think>') %}{% if m.role == "
    "'assistant' and loop.index > seen.asked %}<think>\n{% if parts[1:] %}"
    "{{ parts[0].split('<think>')[-1].strip() }}{% endif %}</think>\n\n{% endif %}"
    "{{ parts[-1] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ho ho"}
OTHER = {"role": "user", "content": "more?"}
LAST = {"role": "assistant", "content": "no"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm</think>ho"}
IDS = {"prompt_token_ids": [40, 41], "token_ids": [66, 67, 66, 0]}


def responses(
    path: str,
    words: Any,
) -> list[str | None]:
    """The text of the tokens that each document says are responses."""
    texts = []
    for document in Documents([path], words).tokens():
        written = document.mask and itertools.compress(
            document.ids or [], document.mask
        )
        texts.append(None if written is None else words.decode(list(written)))
    return texts


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [USER, ANSWER, OTHER, LAST]}, "ho ho<|end|>no<|end|>"),
        ({"messages": [USER, ANSWER, OTHER]}, "ho ho<|end|>"),
        ({"messages": [USER]}, ""),
        ({"prompt": "2 + 2 =", "completion": " 4"}, " 4"),
        ({"prompt": [USER], "completion": [ANSWER]}, "ho ho<|end|>"),
        ({"prompt": "2 + 2 ="}, ""),
        ({"text": "2 + 2 = 4"}, None),
    ],
)
@pytest.mark.parametrize("is_fast", [True, False])
def test_what_a_record_says_is_a_response(
    tmp_path: Path, record: Any, expected: str | None, is_fast: bool
) -> None:
    """Also by a tokenizer in Python, which does not say where its tokens are."""
    words = templated(TEMPLATE)
    words.__class__ = type("Words", (type(words),), {"is_fast": is_fast})
    assert responses(write(tmp_path / "a.jsonl", record), words) == [expected]


@pytest.mark.parametrize(
    ("template", "messages", "prompts", "expected"),
    [
        (
            FORGETFUL,
            [USER, ANSWER, OTHER, LAST],
            [
                "<user>hi<assistant>",
                "<user>hi<assistant>ho ho<user>more?<assistant>",
            ],
            ["so: ho ho", "so: no"],
        ),
        (
            OPENING,
            [USER, ANSWER, OTHER, THOUGHT],
            ["<user>hi<assistant>ho ho<|end|><user>more?<assistant><think>\n"],
            ["hm</think>ho<|end|>"],
        ),
        (
            QWEN3,
            [USER, THOUGHT, OTHER, THOUGHT, USER, LAST],
            [
                "<user>hi<|end|>\n<assistant>",
                "<user>hi<|end|>\n<assistant>ho<|end|>\n"
                "<user>more?<|end|>\n<assistant>",
                "<user>hi<|end|>\n<assistant>ho<|end|>\n"
                "<user>more?<|end|>\n<assistant>ho<|end|>\n"
                "<user>hi<|end|>\n<assistant>",
            ],
            [
                "<think>\nhm</think>\n\nho<|end|>",
                "<think>\nhm</think>\n\nho<|end|>",
                "<think>\n</think>\n\nno<|end|>",
            ],
        ),
    ],
)
def test_a_chat_whose_template_rewrites_turns_is_split(
    tmp_path: Path,
    template: str,
    messages: list[Any],
    prompts: list[str],
    expected: list[str],
) -> None:
    """Into what the server would read before each answer, and what the model writes then."""
    words = templated(template)
    path = write(tmp_path / "a.jsonl", {"messages": messages})
    documents = Documents([path], words, by_answer=True).tokens()
    for document, prompt, response in zip(
        documents, prompts, expected, strict=True
    ):
        count = len(words(prompt)["input_ids"])
        assert document.ids == words(prompt + response)["input_ids"]
        assert document.mask == [
            place >= count for place in range(len(document.ids))
        ]
    # Other readers take whole chats, of which no prompt is a response.
    assert responses(path, words)[0] in ("", expected[0])
    facts = store(tmp_path, *[{"messages": messages}] * 20, words=words).facts()
    assert facts["documents_in_data"] == 20
    assert facts["answers_in_data"] == 20 * len(expected)
    written = [text.removesuffix("<|end|>") for text in expected]
    tokens = [len(words(text)["input_ids"]) + 1 for text in written]
    assert facts["counted_tokens_in_data"] == 20 * sum(tokens)


def store(
    folder: Path, *records: Any, words: Any = None, **changes: Any
) -> TokenStore:
    data = write(folder / "data.jsonl", *records)
    words = words or templated(TEMPLATE)
    return TokenStore(
        folder / "work", [data], words, len(words), 0.3, 8, **changes
    )


def documents_of(
    store: TokenStore,
    split: str = "train",
) -> list[list[int]]:
    """The token IDs of each document."""
    starts = store.starts[split][1:]
    return [ids.tolist() for ids in np.split(store.tokens[split]["id"], starts)]


def test_windows_and_counts_are_of_responses(tmp_path: Path) -> None:
    made = store(tmp_path, *[IDS] * 40)
    batch = made.batch("train", [1, 0])
    learned = torch.tensor([66, 67, 0])
    assert torch.equal(batch.counted, torch.isin(batch.input_ids, learned))
    (runs, *_) = made.responses()
    assert [run.tolist() for run in runs] == [IDS["token_ids"]]
    counts = made.token_counts()
    assert set(counts.nonzero().flatten().tolist()) == {0, 66, 67}
    assert counts[66] == 2 * counts[67]
    whole = store(tmp_path, *[IDS] * 40, train_on_prompts=True)
    assert whole.batch("train", [1, 0]).counted is None
    counts = whole.token_counts()
    assert counts[40] == counts[67] > 0
    with pytest.raises(
        TrainingError, match=r"empty .1 files; skipped 40: 40 a prompt"
    ):
        store(tmp_path, *[{"prompt_token_ids": [40, 41]}] * 40)


def test_what_cannot_be_learned_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts alone, and answers that the template does not render as the model writes them."""
    data = [
        {"messages": [USER]},
        {"messages": [USER, ANSWER]},
        {"messages": [OTHER, THOUGHT]},
    ] * 40
    words = templated(OPENING)
    manifest = store(tmp_path, *data, words=words).manifest
    rewritten = (
        "an answer that the chat template does not render as the model writes it"
    )
    assert manifest.skipped == {"a prompt without a response": 40, rewritten: 40}
    assert manifest.documents == 40
    assert (
        "skipped 80: 40 a prompt without a response, 40 an answer that"
        in capsys.readouterr().err
    )
    manifest = store(
        tmp_path,
        *data,
        words=words,
        train_on_prompts=True,
    ).manifest
    assert manifest.documents == 120 and not manifest.skipped


@pytest.mark.parametrize("template", [TEMPLATE, FORGETFUL, None])
def test_answers_to_the_same_prompt_are_on_the_same_side(
    tmp_path: Path, template: str | None
) -> None:
    """Whether the template splits their chats or not, and also later turns of a chat."""
    records: list[dict[str, Any]] = []
    for i in range(200):
        question = {"role": "user", "content": f"question {i % 50}"}
        messages = [
            question,
            {"role": "assistant", "content": f"{i}"},
            OTHER,
            LAST,
        ]
        ids = {
            "prompt_token_ids": [40 + i % 50, 41],
            "token_ids": [90 + i % 7, 0],
        }
        records.append({"messages": messages[: 2 + i % 3]} if template else ids)
    words = templated(template)
    made = store(tmp_path, *records, words=words)
    train, held_out = (
        {
            words.decode(ids).partition("<assistant>")[0] if template else ids[0]
            for ids in documents_of(made, split)
        }
        for split in ("train", "held_out")
    )
    assert train and held_out and not train & held_out
    assert len(train | held_out) == 50


TURN_END = tiny.VOCAB  # a special token other than the end of text


@pytest.mark.parametrize(
    ("record", "is_added"),
    [
        ({"messages": [USER, ANSWER]}, False),
        ({"messages": [USER, ANSWER, OTHER]}, False),
        (IDS | {"token_ids": [66, TURN_END], "finish_reason": "stop"}, False),
        (IDS | {"token_ids": [66, 67], "finish_reason": "stop"}, True),
        (IDS | {"token_ids": [66, 67], "finish_reason": "length"}, False),
        ({"text": "hello"}, True),
    ],
)
def test_an_end_is_added_where_there_is_none(
    tmp_path: Path, record: Any, is_added: bool
) -> None:
    """A chat template may end turns by another token than the tokenizer's end of text,
    and a chat by a question; a response may be cut off.
    """
    words = templated(TEMPLATE.replace("<|end|>", "<turn|>"))
    words.add_special_tokens({"additional_special_tokens": ["<turn|>"]})
    assert words.convert_tokens_to_ids("<turn|>") == TURN_END
    made = store(tmp_path, *[record] * 40, words=words)
    assert documents_of(made)[0].count(words.eos_token_id) == is_added


OPTIONS: dict[str, dict[str, Any]] = {
    "early": {"exit_layers": (2, 4)},
    "early classifier": {"exit_layers": (2, 4), "head": "classifier"},
    "cp": {"rank": 2, "num_speculative_tokens": 2},
    "dynamo": {},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_are_of_the_counted_tokens(tiny_model: Factory, name: str) -> None:
    """Sums over the rows of a document are those of its rows one by one: a mask picks
    rows, ends what they learn, and changes nothing else. A batch of prompts alone
    trains nothing.
    """
    torch.manual_seed(0)
    made = untrained(tiny_model(), name.split()[0], **OPTIONS[name]).eval()
    length = 12
    batch = Batch(torch.randint(1, 200, (1, length)), torch.arange(length)[None])
    _, whole = made.loss(batch)
    sums: defaultdict[str, Any] = defaultdict(int)
    for start in range(1, length):
        end = min(start + 3, length)
        # The row before a run, which a shorter run does not have
        for begin, sign in ((start, 1), (start + 1, -1)):
            counted = torch.zeros(1, length, dtype=torch.bool)
            counted[0, begin:end] = True
            _, counts = made.loss(replace(batch, counted=counted))
            for key, count in counts.items():
                sums[key] += sign * count
    for key, count in whole.items():
        torch.testing.assert_close(sums[key].to(count.dtype), count, msg=key)
    loss, _ = made.train().loss(replace(batch, counted=torch.zeros_like(counted)))
    loss.backward()
    assert loss.item() == 0
    gradients = [p.grad for p in made.parameters() if p.requires_grad]
    assert gradients
    assert all(g is not None and not g.any() for g in gradients)
