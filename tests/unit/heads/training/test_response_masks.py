# SPDX-License-Identifier: Apache-2.0
"""Prompts are left out of the loss: what of a record is a response, and what each kind of heads makes of it."""

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
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}so: {% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho ho"}
OTHER, LAST = {"role": "user", "content": "more?"}, {"role": "assistant", "content": "no"}


def responses(path: Path, words: Any) -> list[str | None]:
    """The text of the tokens that each document says are responses."""
    texts = []
    for document in Documents([path], lambda: words).tokens():
        mask = document.mask
        texts.append(None if mask is None else words.decode(list(itertools.compress(document.ids or [], mask))))
    return texts


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [USER, ANSWER]}, "ho ho<|end|>"),
        ({"messages": [USER, ANSWER, OTHER, LAST]}, "ho ho<|end|>no<|end|>"),
        ({"messages": [USER, ANSWER, OTHER]}, "ho ho<|end|>"),
        ({"messages": [USER]}, None),
        ({"prompt": "2 + 2 =", "completion": " 4"}, " 4"),
        ({"prompt": [USER], "completion": [ANSWER]}, "ho ho<|end|>"),
        ({"text": "2 + 2 = 4"}, None),
        ({"prompt_token_ids": [40, 41], "token_ids": [66, 67, 0], "finish_reason": "stop", "index": 3}, "ab<|end|>"),
        ({"prompt_token_ids": [40, 41]}, None),
    ],
)
def test_what_a_record_says_is_a_response(tmp_path: Path, record: Any, expected: str | None) -> None:
    words = templated(TEMPLATE)
    if expected is not None and "prompt_token_ids" in record:
        expected = words.decode(record["token_ids"])
    assert responses(write(tmp_path / "a.jsonl", record), words) == [expected]


def test_a_template_that_rewrites_turns_gives_no_mask(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER, OTHER, LAST]})
    assert responses(path, templated(FORGETFUL)) == ["so: ho ho", None]


def store(folder: Path, *records: Any, **changes: Any) -> TokenStore:
    data = write(folder / "data.jsonl", *records * 40)
    return TokenStore(folder / "work", [data], templated(TEMPLATE), tiny.VOCAB, 0.3, 16, **changes)


def test_a_response_that_was_cut_off_gets_no_end(tmp_path: Path) -> None:
    record = {"prompt_token_ids": [40, 41], "token_ids": [66, 67]}
    for reason, ids in (("stop", [40, 41, 66, 67, 0]), ("length", [40, 41, 66, 67])):
        (tmp_path / reason).mkdir()
        made = store(tmp_path / reason, record | {"finish_reason": reason})
        assert next(made.documents()).tolist() == ids
        assert made.tokens["train"]["counted"][: len(ids)].tolist() == [False, False, *[True] * (len(ids) - 2)]


def test_a_chat_ends_once(tmp_path: Path) -> None:
    made = store(tmp_path, {"messages": [USER, ANSWER]})
    text = templated(TEMPLATE).apply_chat_template([USER, ANSWER], tokenize=False)
    assert next(made.documents()).tolist() == templated(TEMPLATE)(text)["input_ids"]


def test_windows_have_the_mask_and_may_train_on_prompts(tmp_path: Path) -> None:
    record = {"prompt_token_ids": [40, 41, 42], "token_ids": [66, 67, 68, 0], "finish_reason": "stop"}
    made = store(tmp_path, record)
    batch = made.batch("train", [1, 0])
    assert batch.counted is not None
    assert torch.equal(batch.counted, torch.isin(batch.input_ids, torch.tensor([66, 67, 68, 0])))
    assert torch.equal(batch.chosen([1]).counted, batch.counted[1:])
    assert store(tmp_path, record, train_on_prompts=True).batch("train", [1, 0]).counted is None
    with pytest.raises(TrainingError, match="no train token belongs to a response"):
        store(tmp_path, record | {"token_ids": [], "finish_reason": "length"})


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
        options = KINDS[name.split()[0]].options(model="-", data=("-",), out="-", **OPTIONS[name])
        return recipe_of(options.kind)(options, target).eval()

    return make


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_are_of_the_counted_tokens(recipe: Callable[[str], Any], name: str) -> None:
    """Sums over the rows of a document are those of its rows one by one: a mask picks rows and changes nothing else."""
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
            # A run of n tokens: for kinds whose heads look n ahead, the one row before it.
            wanted = {key for key in counts if name != "dynamo" or key.endswith(f".{end - start}")}
            wanted = wanted if name != "cp" or end - start == reach else set()
            for key in wanted:
                sums[key] = sums.get(key, torch.zeros(())) + counts[key]
    # Accepted drafts are of rows all of whose drafts are counted.
    expected = {key: value for key, value in whole.items() if name == "cp" or not key.startswith("accepted")}
    assert expected.keys() == {key for key in sums if name == "cp" or not key.startswith("accepted")}
    for key, value in expected.items():
        torch.testing.assert_close(sums[key].to(value.dtype), value, msg=key)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_batch_of_prompts_alone_trains_nothing(recipe: Callable[[str], Any], name: str) -> None:
    made = recipe(name).train()
    batch = Batch(torch.randint(1, 200, (1, 12)), torch.arange(12)[None])
    loss, _ = made.loss(replace(batch, counted=torch.zeros(1, 12, dtype=torch.bool)))
    loss.backward()
    assert float(loss.detach()) == 0
    gradients = [p.grad for p in made.parameters() if p.requires_grad]
    assert gradients
    assert all(g is not None and not g.any() for g in gradients)
