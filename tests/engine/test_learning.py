# SPDX-License-Identifier: Apache-2.0
"""Heads that engines learn while they serve: the output stays the target's before, while
and after, and the heads draft.
"""

import errno
import logging
import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import adapters
import preempted
import pytest
from cases import generate, greedy, in_turn, prompts, tokens_of
from configured import drafting, from_dict
from conftest import (
    Factory,
    accepting,
    counting,
    drafter_of,
    our_log,
    runner_of,
    scheduler_of,
    start_engine,
)
from learned import SMALL, learn_from_few
from methods import imitate_sleep
from updated import change_weights
from vllm.lora.request import LoRARequest
from waits import watching

from vllm_ppd.heads.folder import check_folder
from vllm_ppd.heads.target import fingerprint
from vllm_ppd.vllm_plugins.config import activation
from vllm_ppd.vllm_plugins.config.found import learned_folder
from vllm_ppd.vllm_plugins.draft_length.learning import Report
from vllm_ppd.vllm_plugins.engine.lookup import LIMIT
from vllm_ppd.vllm_plugins.methods.learning.speculator import SAVING

pytestmark = pytest.mark.engine
PPD = {"method": "ppd"}
REQUESTS = prompts(12, 60)
LENGTH = 120
K = 3
# So that the same requests take the same steps
SYNC = {"async_scheduling": False}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer tokens in the draft vocabulary than the tiny model has."""
    learn_from_few(monkeypatch)
    monkeypatch.setattr(
        activation,
        "DRAFTED",
        200,
    )


@pytest.fixture(scope="module")
def expected(engine: Factory) -> list[list[int]]:
    return answers(engine())


def answers(llm: Any, **params: Any) -> list[list[int]]:
    return generate(llm, REQUESTS, greedy(LENGTH, **params))


def learning(llm: Any) -> bool:
    return drafter_of(llm).learner is not None


def teach(llm: Any, expected: list[list[int]], **params: Any) -> Counter[str]:
    """Ask until learning has ended, and compare each answer."""
    with counting(llm) as seen:
        for _ in range(8):
            assert answers(llm, **params) == expected
            if not learning(llm):
                break
    return seen


def accepted_of_heads(llm: Any, expected: list[list[int]]) -> int:
    """Accepted drafts where no lookup is taken."""
    lookup = drafter_of(llm).lookup
    lookup.gains.fill_(-LIMIT)
    shortest, lookup.shortest = lookup.shortest, 1000
    with counting(llm) as seen:
        assert answers(llm) == expected
    lookup.shortest = shortest
    lookup.forget()
    return seen["accepted"]


@pytest.mark.parametrize("adaptive", [False, True])
def test_learned_heads_draft(
    tiny_model: Factory, expected: list[list[int]], adaptive: bool
) -> None:
    llm = start_engine(
        tiny_model(), PPD | {"adaptive": adaptive}, async_scheduling=adaptive
    )
    with our_log(logging.INFO) as lines:
        seen = teach(llm, expected)
    assert not learning(llm)
    assert seen["learned_solutions"] > 0 and seen["accepted"] > 0
    assert seen["learned_positions"] >= SMALL["MARKS"][-1] * 64
    assert any("draft from here on" in line for line in lines)
    if not adaptive:
        assert accepted_of_heads(llm, expected) > 50
    with counting(llm) as seen:
        assert answers(llm) == expected
    assert not seen["learned_positions"]


def test_requests_that_are_left_out(
    tiny_model: Factory, engine: Factory, tmp_path: Path
) -> None:
    """Those with an adapter, and those that opt out; not those beside them."""
    folder = adapters.make_adapter(tmp_path, tiny_model())
    adapter = LoRARequest("random", 1, str(folder))
    settings = adapters.SETTINGS

    def said(llm: Any, learned: bool) -> list[list[int]]:
        outputs = llm.generate(
            REQUESTS,
            greedy(LENGTH, extra_args={"ppd_learn": learned}),
            lora_request=[adapter if i % 2 else None for i in range(12)],
            use_tqdm=False,
        )
        return tokens_of(outputs)

    llm = start_engine(tiny_model(), PPD, **settings)
    counts = drafter_of(llm).pairs.counts.seen
    with accepting(llm):
        texts = said(llm, False)
    assert texts == said(engine(**settings), False) and not counts.any()
    assert said(llm, True) == texts
    most = 6 * (LENGTH - K)
    assert most - 6 * (K + 1) <= counts.sum() <= most


def operators(llm: Any) -> Counter[str]:
    """Operators of the runner's steps for one request."""
    with watching(runner_of(llm), "execute_model", "sample_tokens") as calls:
        generate(llm, REQUESTS[:1], greedy(20))
    return sum((call.operations for call in calls), Counter())


def test_nothing_is_launched_where_nothing_was_gained(
    tiny_model: Factory,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learning ends by itself, and steps are those of lookups alone."""
    monkeypatch.setattr(
        Report,
        "gains",
        lambda report: False,
    )
    llm = start_engine(tiny_model(), PPD)
    while_learning = operators(llm)
    seen = teach(llm, expected)
    assert not learning(llm) and not seen["learned_solutions"]
    never = PPD | {"learn": False, "num_speculative_tokens": 3}
    other = start_engine(tiny_model(), never | {"prompt_lookup_min": 2}, **SYNC)
    assert answers(other) == expected
    ended = operators(llm)
    assert ended.keys() == operators(other).keys()
    writes = "index_put_"
    assert while_learning[writes] > ended[writes]


def test_sleep(
    tiny_model: Factory,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While heads are learned, and afterwards."""
    imitate_sleep(monkeypatch)
    llm = start_engine(tiny_model(), PPD, enable_sleep_mode=True)
    begun = generate(llm, REQUESTS, greedy(20))
    assert begun == [text[:20] for text in expected] and learning(llm)
    llm.sleep(level=1)
    llm.wake_up()
    assert teach(llm, expected)["learned_solutions"] > 0
    llm.sleep(level=1)
    llm.wake_up()
    assert accepted_of_heads(llm, expected) > 50


def test_sampled_and_preempted_requests(
    tiny_model: Factory, engine: Factory
) -> None:
    """Also in a round that begins with learned heads."""
    llm = start_engine(tiny_model(), PPD, **preempted.SMALL_KV)
    alone = engine(on_v2=True, **preempted.SMALL_KV)
    answers = in_turn(alone, preempted.PROMPTS, preempted.PARAMS)
    learned = False
    with counting(llm) as seen:
        while not learned:
            learned = seen["learned_solutions"] > 0
            assert generate(llm, preempted.PROMPTS, preempted.PARAMS) == answers
            assert preempted.reset_between(llm) == answers
    assert seen["preempted"] > 5


def test_new_weights_are_learned_anew(
    tiny_model: Factory, other_model: Path, expected: list[list[int]]
) -> None:
    llm = start_engine(tiny_model(), PPD)
    teach(llm, expected)
    change_weights(
        llm,
        other_model,
        "reload",
    )
    assert learning(llm) and drafter_of(llm).lookup.alone
    others = start_engine(other_model, None)
    seen = teach(
        llm,
        generate(
            others,
            REQUESTS,
            greedy(LENGTH),
        ),
    )
    assert not learning(llm) and seen["learned_solutions"] > 0
    assert scheduler_of(llm).learning.installed


def saved() -> None:
    """Wait until heads are written."""
    for thread in threading.enumerate():
        if thread.name == SAVING:
            thread.join()


def test_learned_heads_are_written_and_read(
    tiny_model: Factory,
    other_model: Path,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    """Neither damaged ones nor those of another model keep a server from starting."""
    options = PPD | {"learn_dir": str(tmp_path)}
    assert drafting(from_dict(tiny_model(), options)).learns
    llm = start_engine(tiny_model(), options)
    teach(llm, expected)
    saved()
    (folder,) = tmp_path.iterdir()
    assert check_folder(folder).describe().startswith("rank 1 over 4 positions")
    config = drafting(from_dict(tiny_model(), options))
    assert (config.method, config.model) == ("cp", str(folder))
    after = start_engine(tiny_model(), options)
    assert accepted_of_heads(after, expected) > 50
    other = learned_folder(str(tmp_path), fingerprint(other_model))
    shutil.copytree(folder, other)
    (folder / "model.safetensors").write_bytes(b"damaged")
    for model in (other_model, tiny_model()):
        with our_log() as lines:
            config = drafting(from_dict(model, options))
        assert config.learns and len(lines) == 1 and "not used" in lines[0]
    teach(start_engine(tiny_model(), options), expected)
    saved()
    check_folder(folder)


def full_disk(file: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_that_cannot_be_written_is_one_line(
    tiny_model: Factory,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    full: bool,
) -> None:
    folder = tmp_path / "learned"
    if full:
        monkeypatch.setattr(os, "fsync", full_disk)
    else:
        folder.touch()
    llm = start_engine(tiny_model(), PPD | {"learn_dir": str(folder)})
    with our_log() as lines:
        teach(llm, expected)
        saved()
    assert len(lines) == 1 and "cannot be written" in lines[0]
    assert not list(folder.glob("*/*"))
    assert accepted_of_heads(llm, expected) > 50
