# SPDX-License-Identifier: Apache-2.0
"""Prompts are left out of the loss: what of a record is a response, and what each kind
of heads makes of it.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import Factory
from records import templated, write

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.kinds import KINDS, recipe_of
from vllm_ppd.heads.training.target import Target
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
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ho ho"}
OTHER = {"role": "user", "content": "more?"}
LAST = {"role": "assistant", "content": "no"}


def responses(path: str, words: Any, **settings: Any) -> list[str | None]:
    """The text of the tokens that each document says are responses."""
    texts = []
    for document in Documents([path], lambda: words, **settings).tokens():
        mask = document.mask
        texts.append(
            None
            if mask is None
            else words.decode(list(itertools.compress(document.ids or [], mask)))
        )
    return texts


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [USER, ANSWER, OTHER, LAST]}, "ho ho<|end|>no<|end|>"),
        ({"messages": [USER, ANSWER, OTHER]}, "ho ho<|end|>"),
        ({"messages": [USER]}, ""),
        ({"prompt": "2 + 2 =", "completion": " 4"}, " 4"),
        ({"prompt": [USER], "completion": [ANSWER]}, "ho ho<|end|>"),
        ({"text": "2 + 2 = 4"}, None),
        (
            {
                "prompt_token_ids": [40, 41],
                "token_ids": [66, 67, 0],
                "finish_reason": "stop",
                "index": 3,
            },
            "ab<|end|>",
        ),
        ({"prompt": "2 + 2 ="}, ""),
    ],
)
def test_what_a_record_says_is_a_response(
    tmp_path: Path, record: Any, expected: str | None
) -> None:
    words = templated(TEMPLATE)
    if expected and "prompt_token_ids" in record:
        expected = words.decode(record["token_ids"])
    assert responses(write(tmp_path / "a.jsonl", record), words) == [expected]


THOUGHT = {"role": "assistant", "content": "<think>\nhm</think>ho"}


@pytest.mark.parametrize(
    ("template", "messages", "prompts", "expected"),
    [
        (
            FORGETFUL,
            [USER, ANSWER, OTHER, LAST],
            ["<user>hi<assistant>", "<user>hi<assistant>ho ho<user>more?<assistant>"],
            ["so: ho ho", "so: no"],
        ),
        (
            OPENING,
            [USER, ANSWER, OTHER, THOUGHT],
            ["<user>hi<assistant>ho ho<|end|><user>more?<assistant><think>\n"],
            ["hm</think>ho<|end|>"],
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
    documents = [*Documents([path], lambda: words, by_answer=True).tokens()]
    for document, prompt, response in zip(documents, prompts, expected, strict=True):
        count = len(words(prompt)["input_ids"])
        assert document.ids == words(prompt + response)["input_ids"]
        assert document.mask == [place >= count for place in range(len(document.ids))]
    for learnt in responses(
        path, words
    ):  # other readers take whole chats, of which no prompt is a response
        assert learnt in ("", expected[0])


class Slow:
    """A tokenizer that does not say where its tokens are in the text, as those written
    in Python.
    """

    is_fast = False

    def __init__(self, words: Any) -> None:
        self.words = words

    def __call__(
        self, texts: Any, return_offsets_mapping: bool = False, **settings: Any
    ) -> Any:
        return self.words(texts, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.words, name)


def test_a_tokenizer_without_offsets_gives_the_same_responses(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER, OTHER, LAST]})
    assert responses(path, Slow(templated(TEMPLATE))) == ["ho ho<|end|>no<|end|>"]


def store(folder: Path, *records: Any, **changes: Any) -> TokenStore:
    data = write(folder / "data.jsonl", *records * 40)
    return TokenStore(
        folder / "work", [data], templated(TEMPLATE), tiny.VOCAB, 0.3, 16, **changes
    )


def test_a_response_that_was_cut_off_gets_no_end(tmp_path: Path) -> None:
    record = {"prompt_token_ids": [40, 41], "token_ids": [66, 67]}
    for reason, ids in (("stop", [40, 41, 66, 67, 0]), ("length", [40, 41, 66, 67])):
        (tmp_path / reason).mkdir()
        made = store(tmp_path / reason, record | {"finish_reason": reason})
        assert next(made.documents()).tolist() == ids
        assert made.tokens["train"]["counted"][: len(ids)].tolist() == [
            False,
            False,
            *[True] * (len(ids) - 2),
        ]


def test_windows_have_the_mask_and_may_train_on_prompts(tmp_path: Path) -> None:
    record = {
        "prompt_token_ids": [40, 41, 42],
        "token_ids": [66, 67, 68, 0],
        "finish_reason": "stop",
    }
    made = store(tmp_path, record)
    batch = made.batch("train", [1, 0])
    assert batch.counted is not None
    assert torch.equal(
        batch.counted, torch.isin(batch.input_ids, torch.tensor([66, 67, 68, 0]))
    )
    assert torch.equal(batch.chosen([1]).counted, batch.counted[1:])
    assert (
        store(tmp_path, record, train_on_prompts=True).batch("train", [1, 0]).counted
        is None
    )
    with pytest.raises(
        TrainingError,
        match="no token of the data belongs to a response; skipped 40: 40 a prompt",
    ):
        store(tmp_path, record | {"token_ids": [], "finish_reason": "length"})


def test_what_cannot_be_learnt_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts alone, and answers that the template does not render as the model writes them."""
    data = [
        {"messages": [USER]},
        {"messages": [USER, ANSWER]},
        {"messages": [OTHER, THOUGHT]},
    ]
    path = write(tmp_path / "data.jsonl", *data * 40)
    made = TokenStore(
        tmp_path / "work", [path], templated(OPENING), tiny.VOCAB, 0.3, 16
    )
    rewritten = (
        "an answer that the chat template does not render as the model writes it"
    )
    assert made.manifest.skipped == {"a prompt without a response": 40, rewritten: 40}
    assert made.manifest.documents == 40
    assert (
        "skipped 80: 40 a prompt without a response, 40 an answer that"
        in capsys.readouterr().err
    )
    whole = TokenStore(
        tmp_path / "all",
        [path],
        templated(OPENING),
        tiny.VOCAB,
        0.3,
        16,
        train_on_prompts=True,
    )
    assert whole.manifest.documents == 120 and not whole.manifest.skipped


def test_answers_to_the_same_prompt_are_on_the_same_side(tmp_path: Path) -> None:
    """Whether the template splits their chats or not, and also later turns of a chat."""
    chats = [
        [
            {"role": "user", "content": f"question {i % 50}"},
            {"role": "assistant", "content": f"{i}"},
            OTHER,
            LAST,
        ]
        for i in range(200)
    ]
    path = write(
        tmp_path / "chats.jsonl",
        *({"messages": messages[: 2 + i % 3]} for i, messages in enumerate(chats)),
    )
    ids = [
        {"prompt_token_ids": [40 + i % 50, 41], "token_ids": [90 + i % 7, 0]}
        for i in range(200)
    ]
    for name, data, template in (
        ("whole", path, TEMPLATE),
        ("split", path, FORGETFUL),
        ("ids", write(tmp_path / "ids.jsonl", *ids), TEMPLATE),
    ):
        made = TokenStore(
            tmp_path / name, [data], templated(template), tiny.VOCAB, 0.3, 16
        )
        prompts = {}
        for split in ("train", "held_out"):
            texts = [made_of(ids.tolist(), name) for ids in made.documents(split)]
            prompts[split] = set(texts)
        assert prompts["train"] and prompts["held_out"]
        assert not prompts["train"] & prompts["held_out"]
        assert sum(map(len, prompts.values())) == 50


def made_of(ids: list[int], name: str) -> Any:
    """The first prompt of a document."""
    return (
        ids[0]
        if name == "ids"
        else templated(TEMPLATE).decode(ids).partition("<assistant>")[0]
    )


def test_counts_are_of_the_tokens_that_are_learnt(tmp_path: Path) -> None:
    record = {"prompt_token_ids": [40, 41, 42], "token_ids": [66, 67, 66, 0]}
    made = store(tmp_path, record)
    counts = made.token_counts(tiny.VOCAB)
    (runs, *_) = made.responses()
    assert [run.tolist() for run in runs] == [[66, 67, 66, 0]]
    assert set(counts.nonzero().flatten().tolist()) == {0, 66, 67}
    assert counts[66] == 2 * counts[67]
    both = store(tmp_path, record, train_on_prompts=True).token_counts(tiny.VOCAB)
    assert both[40] == both[67] > 0


TURN_END = 1  # a special token of the tiny tokenizer other than the end of text


@pytest.mark.parametrize(
    ("record", "is_added"),
    [
        ({"messages": [USER, ANSWER]}, False),
        ({"messages": [USER, ANSWER, OTHER]}, False),
        (
            {
                "prompt_token_ids": [40, 41],
                "token_ids": [66, 67, TURN_END],
                "finish_reason": "stop",
            },
            False,
        ),
        (
            {
                "prompt_token_ids": [40, 41],
                "token_ids": [66, 67],
                "finish_reason": "stop",
            },
            True,
        ),
        ({"text": "hello"}, True),
    ],
)
def test_an_end_is_added_where_there_is_none(
    tmp_path: Path, record: Any, is_added: bool
) -> None:
    """A chat template may end turns by another token than the tokenizer's end of text,
    and a chat by a question.
    """
    words = templated(None)
    words.add_special_tokens({"additional_special_tokens": ["<turn|>"]})
    words.chat_template = TEMPLATE.replace("<|end|>", "<turn|>")
    turn = words.convert_tokens_to_ids("<turn|>")
    if "token_ids" in record:
        record = record | {
            "token_ids": [turn if i == TURN_END else i for i in record["token_ids"]]
        }
    data = write(tmp_path / "data.jsonl", *[record] * 40)
    made = TokenStore(tmp_path / "work", [data], words, tiny.VOCAB + 1, 0.3, 8)
    end = words.eos_token_id
    assert [int(i) for i in next(made.documents())].count(end) == is_added


OPTIONS: dict[str, dict[str, Any]] = {
    "early": {"exit_layers": (2, 4)},
    "early ce": {"exit_layers": (2, 4), "loss": "ce"},
    "early classifier": {"exit_layers": (2, 4), "head": "classifier"},
    "cp": {"rank": 2, "positions": 3, "num_speculative_tokens": 2},
    "dynamo": {"tokens": 3},
}


@pytest.fixture
def recipe(tiny_model: Factory) -> Callable[[str], Any]:
    def make(name: str) -> Any:
        torch.manual_seed(0)
        target = Target(str(tiny_model()), torch.device("cpu"), torch.float32)
        options = KINDS[name.split()[0]].options(
            model="-", data=("-",), out="-", **OPTIONS[name]
        )
        return recipe_of(options.kind)(options, target).eval()

    return make


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_are_of_the_counted_tokens(
    recipe: Callable[[str], Any], name: str
) -> None:
    """Sums over the rows of a document are those of its rows one by one: a mask picks
    rows and changes nothing else.
    """
    made = recipe(name)
    length = 12
    batch = Batch(torch.randint(1, 200, (1, length)), torch.arange(length)[None])
    _, whole = made.loss(batch)
    reach = {"cp": 3, "dynamo": 3}.get(name, 1)
    sums: dict[str, torch.Tensor] = {}
    for start in range(1, length):
        for end in range(start + 1, min(start + reach, length) + 1):
            counted = torch.zeros(1, length, dtype=torch.bool)
            counted[0, start:end] = True
            _, counts = made.loss(replace(batch, counted=counted))
            # A run of n tokens: for kinds whose heads look n ahead, the one row before
            # it.
            wanted = {
                key
                for key in counts
                if name != "dynamo" or key.endswith(f".{end - start}")
            }
            wanted = wanted if name != "cp" or end - start == reach else set()
            for key in wanted:
                sums[key] = sums.get(key, torch.zeros(())) + counts[key]
    # Accepted drafts are of rows all of whose drafts are counted.
    expected = {
        key: value
        for key, value in whole.items()
        if name == "cp" or not key.startswith("accepted")
    }
    assert expected.keys() == {
        key for key in sums if name == "cp" or not key.startswith("accepted")
    }
    for key, value in expected.items():
        torch.testing.assert_close(sums[key].to(value.dtype), value, msg=key)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_batch_of_prompts_alone_trains_nothing(
    recipe: Callable[[str], Any], name: str
) -> None:
    made = recipe(name).train()
    batch = Batch(torch.randint(1, 200, (1, 12)), torch.arange(12)[None])
    loss, _ = made.loss(replace(batch, counted=torch.zeros(1, 12, dtype=torch.bool)))
    loss.backward()
    assert float(loss.detach()) == 0
    gradients = [p.grad for p in made.parameters() if p.requires_grad]
    assert gradients
    assert all(g is not None and not g.any() for g in gradients)
