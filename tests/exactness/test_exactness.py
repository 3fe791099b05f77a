# SPDX-License-Identifier: Apache-2.0
"""Greedy output equals vLLM's without speculation, token for token, in float32, through real engines."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from cases import CASES, after_a_prefix, generate, greedy, prompts
from conftest import Factory, counting, drafter_of, full_but
from vllm.config import ReasoningConfig

pytestmark = pytest.mark.engine

CUT_OFF = {"disable_by_batch_size": 9}
LOOKUP = {"prompt_lookup_min": 1, "adaptive": True}
CLASSIFIERS, HAND_MADE = ("early", {"head": "classifier"}), ("hand-made", {"exit_layers": (4,), "noise": 0.05})
# CP heads of experts without a condition, of experts that read the drafts or a state that does, and whole classifiers.
PLAIN, CHAIN, RECURRENT, WHOLE = (
    ("cp", {"rank": 3, "condition": "none"}),
    ("cp", {"rank": 3, "condition": "chain"}),
    ("cp", {"rank": 3, "condition": "recurrent", "expert_rank": 4}),
    ("cp", {"rank": 2, "factorised": False, "condition": "none"}),
)
DYNAMO = {"method": "dynamo", "eps_b": 0.1, "heads": ("dynamo", {})}
# A case must hold for each. "heads" names what is filled in as the model: a kind of heads and how they are made.
VARIANTS: dict[str, dict[str, Any]] = {
    "middle": {"method": "ppd", "exit_layer": 3},
    "heads": {"method": "ppd", "num_speculative_tokens": 2, "heads": HAND_MADE},
    "classifiers": {"method": "ppd", "exit_layer": 4, "gamma": 0.02, "heads": CLASSIFIERS},
    "last": {"method": "ppd", "exit_layer": 5, "num_speculative_tokens": 7, "draft_sample_method": "greedy"},
    "cut-off": {"method": "ppd", "exit_layer": 3, **CUT_OFF},
    "cp": {"method": "cp", "heads": PLAIN},
    "cp-token": {"method": "cp", "heads": ("cp", {"rank": 3, "condition": "token"})},
    "cp-chain": {"method": "cp", "heads": CHAIN},
    "cp-chain-short": {"method": "cp", "num_speculative_tokens": 2, "draft_vocab_size": 100, "heads": CHAIN},
    "cp-recurrent": {"method": "cp", "heads": RECURRENT},
    "cp-layers": {"method": "cp", "heads": ("cp", {**RECURRENT[1], "layers": (1, 3)})},
    "cp-recurrent-longer": {"method": "cp", "num_speculative_tokens": 5, "draft_vocab_size": 100, "heads": RECURRENT},
    "cp-full": {"method": "cp", "num_speculative_tokens": 2, "heads": WHOLE},
    "cp-short": {"method": "cp", "draft_vocab_size": 100, "heads": PLAIN},
    "cp-full-short": {"method": "cp", "draft_vocab_size": 60, "heads": WHOLE},
    "dynamo-short": {**DYNAMO, "draft_vocab_size": 100},
    "dynamo": DYNAMO,
    "dynamo-cut-off": DYNAMO | CUT_OFF,
    "dynamo-2": {**DYNAMO, "num_speculative_tokens": 1, "eps_b": 0.0, "heads": ("dynamo", {"mask_entries": 0})},
    "lookup": {"method": "ppd", "exit_layer": 3, "prompt_lookup_min": 1},
    "lookup-adaptive": {"method": "ppd", "exit_layer": 3, **LOOKUP},
    "lookup-alone": {"method": "ppd", "prompt_lookup_min": 1},
    "cp-lookup": {"method": "cp", **LOOKUP, "heads": ("cp", {"rank": 3})},
    "dynamo-lookup": DYNAMO | LOOKUP,
    "recurrent": {"method": "recurrent", "heads": ("recurrent", {"tie_weights": False})},
    "recurrent-short": {"method": "recurrent", "num_speculative_tokens": 5, "draft_vocab_size": 100,
                        "heads": ("recurrent", {})},
}  # fmt: skip
QUICK = {(name, case) for name in ("middle", "cp", "dynamo") for case in CASES} | {
    ("classifiers", "batch_16"), ("heads", "batch_16"), ("heads", "structured_output"),
    ("last", "batch_16"), ("last", "model_length"),
    ("cut-off", "more_than_fit"), ("dynamo-cut-off", "more_than_fit"),
    ("lookup", "batch_1"), ("lookup", "structured_output"), ("lookup", "model_length"),
    ("lookup-adaptive", "more_than_fit"), ("lookup-alone", "batch_16"), ("lookup-alone", "arrivals_and_aborts"),
    ("cp-lookup", "batch_16"), ("dynamo-lookup", "arrivals_and_aborts"),
    ("cp-token", "batch_16"), ("cp-token", "arrivals_and_aborts"), ("cp-chain", "batch_1"), ("cp-chain", "batch_16"),
    ("cp-chain", "model_length"), ("cp-chain-short", "more_than_fit"),
    ("cp-recurrent", "batch_16"), ("cp-recurrent", "arrivals_and_aborts"), ("cp-layers", "batch_16"),
    ("cp-layers", "arrivals_and_aborts"), ("cp-recurrent-longer", "model_length"),
    ("recurrent", "batch_16"), ("recurrent", "arrivals_and_aborts"), ("recurrent", "structured_output"),
    ("recurrent-short", "more_than_fit"), ("recurrent-short", "model_length"), ("recurrent-short", "penalties"),
    ("cp-full", "batch_16"), ("dynamo-2", "batch_16"), ("cp-short", "batch_16"), ("dynamo-short", "batch_16"),
}  # fmt: skip


@pytest.fixture
def variant(with_heads: Factory) -> Callable[[str], dict[str, Any]]:
    return lambda name: with_heads(VARIANTS[name])


@pytest.mark.parametrize(("name", "case"), full_but(QUICK, itertools.product(VARIANTS, CASES)))
def test_same_tokens(engine: Factory, alone: Factory, variant: Factory, name: str, case: str) -> None:
    expected = alone(case)
    assert CASES[case](engine(variant(name))) == expected


def test_drafts_were_made_and_deferred(engine: Factory) -> None:
    """The suite above would pass without drafting: it must have drafted, accepted, deferred and fallen back."""
    llm = engine(VARIANTS["middle"])
    counters = drafter_of(llm).counters
    before, accepted_before = counters.values.copy(), llm.counts["accepted"]
    CASES["batch_1"](llm)
    deferred, fallback = (counters.values - before)[:2]
    accepted = llm.counts["accepted"] - accepted_before
    prefill_steps = 1 + 1 + 2  # chunks of the three prompts
    # Besides those, only a request's last token may run in full: nothing is drafted for it.
    assert prefill_steps <= fallback <= prefill_steps + 3
    # Every decode step emits one token beyond what it accepts.
    assert deferred + (fallback - prefill_steps) + accepted == 3 * (40 - 1)
    assert accepted > 0


@pytest.mark.parametrize("name", ["cp-short", "cp-chain-short", "cp-recurrent-longer", "cp-full-short", "dynamo-short"])
def test_draft_vocabulary_is_a_part_of_the_lm_head(
    engine: Factory, variant: Factory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its logits are those of the whole at its tokens, and nothing else is drafted."""
    drafter = drafter_of(engine(variant(name)))
    vocabulary, hidden = drafter.host.drafter.vocabulary, torch.randn(5, 64)
    whole = drafter.host.target.lm_head.logits(hidden)
    torch.testing.assert_close(vocabulary.logits(hidden), whole[:, vocabulary.token_ids], rtol=0, atol=1e-5)
    assert vocabulary.place_of[vocabulary.token_ids].tolist() == list(range(len(vocabulary.token_ids)))
    drafted: set[int] = set()
    plan = drafter.draft_plan

    def record(*args: Any) -> Any:
        tokens, made = plan(*args)
        for row, count in zip(tokens.tolist(), made.tolist(), strict=True):
            drafted.update(row[:count])
        return tokens, made

    monkeypatch.setattr(drafter, "draft_plan", record)
    CASES["batch_1"](engine(variant(name)))
    assert drafted and drafted <= set(vocabulary.token_ids.tolist())


HEADS = ["cp", "cp-token", "cp-chain", "cp-chain-short", "cp-full", "cp-short", "dynamo", "dynamo-2", "dynamo-short"]
HEADS += ["cp-recurrent", "cp-layers", "cp-recurrent-longer", "recurrent", "recurrent-short"]


@pytest.mark.parametrize("name", HEADS)
def test_heads_draft_and_are_accepted(engine: Factory, variant: Factory, name: str) -> None:
    """Heads fitted to what the model says are right at times, and wrong at times."""
    llm = engine(variant(name))
    with counting(llm) as seen:
        CASES["batch_16"](llm)
    assert 0.1 < seen["accepted"] / seen["drafted"] < 1


def test_dynamo_drafts_as_many_as_it_is_sure_of(engine: Factory, variant: Factory) -> None:
    """The threshold of a request decides: none, some or all drafts; requests of one batch may differ."""
    llm = engine(variant("dynamo"))
    drafted = {}
    for eps_b in (0.0, 0.6, 1.0):
        with counting(llm) as seen:
            generate(llm, prompts(4), greedy(extra_args={"ppd_eps_b": eps_b}))
        drafted[eps_b] = seen["drafted"]
    assert drafted[1.0] == 0 < drafted[0.6] < drafted[0.0]
    with counting(llm) as seen:
        generate(llm, prompts(4), [greedy(extra_args={"ppd_eps_b": 1.0})] * 3 + [greedy(extra_args={"ppd_eps_b": 0.0})])
    assert 0 < seen["drafted"] < drafted[0.0]


@pytest.mark.parametrize("drafting", [False, True])
def test_thinking_budget(engine: Factory, variant: Factory, drafting: bool) -> None:
    """The end of thinking is forced on the request whose budget ran out, and on no other."""
    reasoning = ReasoningConfig(reasoning_start_str="<", reasoning_end_str=">")
    begin, end = (tiny.make_tokenizer().encode(text, add_special_tokens=False) for text in "<>")
    requests = [{"prompt_token_ids": [*request["prompt_token_ids"], *begin]} for request in prompts(3, 20)]
    settings = [greedy(extra_args={"ppd_draft": drafting}) for _ in requests]
    settings[1].thinking_token_budget = 6
    llm = engine(variant("middle"), reasoning_config=reasoning)
    outputs = generate(llm, requests, settings)
    assert outputs == generate(engine(reasoning_config=reasoning), requests, settings)
    assert [tokens.index(*end) if end[0] in tokens else None for tokens in outputs] == [None, 6, None]


def test_prefix_cache_hits(engine: Factory, variant: Factory) -> None:
    """Hits are as many as without speculation, and what is generated from them is the same."""
    expected = after_a_prefix(engine(enable_prefix_caching=True))
    for name in ("middle", "cp", "dynamo"):
        assert after_a_prefix(engine(variant(name), enable_prefix_caching=True)) == expected


def test_prefix_cache_hits_hold_the_heads_history(engine: Factory, variant: Factory) -> None:
    """DynaMo's drafts after a hit are those without one: the blocks hold the KV of the heads' layers, too."""
    llm = engine(variant("dynamo"), enable_prefix_caching=True)
    request = {"prompt_token_ids": [(11 * j + 5) % 250 + 2 for j in range(100)]}
    drafter, runs = drafter_of(llm), []
    original = drafter.draft
    for expected_hit in (0, 96):
        drafts: list[Any] = []
        drafter.draft = lambda step, kept=drafts: kept.append(original(step)) or kept[-1]
        output = llm.generate([request], greedy(), use_tqdm=False)[0]
        assert output.num_cached_tokens == expected_hit
        runs.append([made for made in drafts if made != [[]]])
    drafter.draft = original
    assert runs[0] == runs[1]
    assert len(runs[0]) > 5


ENGINES = ("middle", "cp", "dynamo", "dynamo-cut-off")


@pytest.mark.parametrize("name", ENGINES)
def test_preemption(engine: Factory, alone: Factory, variant: Factory, name: str) -> None:
    """A KV cache too small for the batch: requests are evicted in mid-decode and resumed."""
    small = {"kv_cache_memory_bytes": 12 * 2 * 6 * 2 * 32 * 32 * 4, "enable_prefix_caching": True}
    expected = alone("batch_16", **small)
    llm = engine(variant(name), **small)
    assert CASES["batch_16"](llm) == expected
    assert llm.counts["preempted"] > 0 and engine(**small).counts["preempted"] > 0


@pytest.mark.parametrize("name", full_but({"middle"}, ENGINES))
def test_compiled(engine: Factory, alone: Factory, variant: Factory, name: str) -> None:
    """The default compilation mode: each stack is compiled by itself, before the first request."""
    expected = tuple(alone(case, enforce_eager=False) for case in ("batch_16", "arrivals_and_aborts"))
    llm = engine(variant(name), enforce_eager=False)
    cut = getattr(getattr(drafter_of(llm).host, "target", None), "cut", None)
    parts = [] if cut is None else [*cut.stacks, cut.whole or cut.stacks[0], getattr(cut, "branches", cut.stacks[0])]
    assert all(part.compiled for part in parts)
    assert (name == "middle") <= (cut is not None and cut.whole is not None)
    assert (CASES["batch_16"](llm), CASES["arrivals_and_aborts"](llm)) == expected
