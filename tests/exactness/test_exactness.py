# SPDX-License-Identifier: Apache-2.0
"""Greedy output equals vLLM's without speculation, token for token, in float32, through
real engines.
"""

import contextlib
import itertools
from collections.abc import Iterator
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
CLASSIFIERS = ("early", {"head": "classifier"})
HAND_MADE = ("hand-made", {"exit_layers": (4,), "noise": 0.05})
# CP heads of experts without a condition, of a state that reads the drafts, and whole
# classifiers.
PLAIN = ("cp", {"rank": 3, "condition": "none"})
RECURRENT = ("cp", {"rank": 3, "condition": "recurrent", "expert_rank": 4})
WHOLE = ("cp", {"rank": 2, "factorised": False, "condition": "none"})
DYNAMO = {"method": "dynamo", "eps_b": 0.1, "heads": ("dynamo", {})}
# A case must hold for each. "heads" names what is filled in as the model: a kind of
# heads and how they are made.
VARIANTS: dict[str, dict[str, Any]] = {
    "middle": {"method": "ppd", "exit_layer": 3},
    "heads": {"method": "ppd", "num_speculative_tokens": 2, "heads": HAND_MADE},
    "classifiers": {
        "method": "ppd",
        "exit_layer": 4,
        "gamma": 0.02,
        "heads": CLASSIFIERS,
    },
    "last": {
        "method": "ppd",
        "exit_layer": 5,
        "num_speculative_tokens": 7,
        "draft_sample_method": "greedy",
    },
    "cut-off": {"method": "ppd", "exit_layer": 3, **CUT_OFF},
    "cp": {"method": "cp", "heads": PLAIN},
    "cp-recurrent": {"method": "cp", "heads": RECURRENT},
    "cp-layers": {"method": "cp", "heads": ("cp", {**RECURRENT[1], "layers": (1, 3)})},
    "cp-recurrent-longer": {
        "method": "cp",
        "num_speculative_tokens": 5,
        "draft_vocab_size": 100,
        "heads": RECURRENT,
    },
    "cp-full": {"method": "cp", "num_speculative_tokens": 2, "heads": WHOLE},
    "cp-short": {"method": "cp", "draft_vocab_size": 100, "heads": PLAIN},
    "cp-full-short": {"method": "cp", "draft_vocab_size": 60, "heads": WHOLE},
    "dynamo-short": {**DYNAMO, "draft_vocab_size": 100},
    "dynamo": DYNAMO,
    "dynamo-cut-off": DYNAMO | CUT_OFF,
    "dynamo-2": {
        **DYNAMO,
        "num_speculative_tokens": 1,
        "eps_b": 0.0,
        "heads": ("dynamo", {"mask_entries": 0}),
    },
    "lookup": {"method": "ppd", "exit_layer": 3, "prompt_lookup_min": 1},
    "lookup-adaptive": {"method": "ppd", "exit_layer": 3, **LOOKUP},
    "lookup-alone": {"method": "ppd", "prompt_lookup_min": 1},
    "cp-lookup": {"method": "cp", **LOOKUP, "heads": ("cp", {"rank": 3})},
    "dynamo-lookup": DYNAMO | LOOKUP,
    "recurrent": {
        "method": "recurrent",
        "heads": ("recurrent", {"tie_weights": False}),
    },
    "recurrent-short": {
        "method": "recurrent",
        "num_speculative_tokens": 5,
        "draft_vocab_size": 100,
        "heads": ("recurrent", {}),
    },
}
QUICK = {(name, case) for name in ("middle", "cp") for case in CASES} | {
    ("dynamo", "batch_1"),
    ("dynamo", "batch_16"),
    ("dynamo", "structured_output"),
    ("dynamo", "arrivals_and_aborts"),
    ("dynamo", "model_length"),
    ("dynamo", "penalties"),
    ("classifiers", "batch_16"),
    ("heads", "batch_16"),
    ("heads", "structured_output"),
    ("last", "batch_16"),
    ("last", "model_length"),
    ("cut-off", "more_than_fit"),
    ("dynamo-cut-off", "more_than_fit"),
    ("lookup", "batch_1"),
    ("lookup", "structured_output"),
    ("lookup", "model_length"),
    ("lookup-adaptive", "more_than_fit"),
    ("lookup-alone", "batch_16"),
    ("lookup-alone", "arrivals_and_aborts"),
    ("cp-lookup", "batch_16"),
    ("dynamo-lookup", "arrivals_and_aborts"),
    ("cp-recurrent", "batch_1"),
    ("cp-recurrent", "batch_16"),
    ("cp-recurrent", "arrivals_and_aborts"),
    ("cp-layers", "batch_16"),
    ("cp-layers", "arrivals_and_aborts"),
    ("cp-recurrent-longer", "model_length"),
    ("cp-recurrent-longer", "more_than_fit"),
    ("recurrent", "batch_16"),
    ("recurrent", "arrivals_and_aborts"),
    ("recurrent", "structured_output"),
    ("recurrent-short", "more_than_fit"),
    ("recurrent-short", "model_length"),
    ("recurrent-short", "penalties"),
    ("cp-full", "batch_16"),
    ("dynamo-2", "batch_16"),
    ("cp-short", "batch_16"),
    ("dynamo-short", "batch_16"),
}


@pytest.mark.parametrize(
    ("name", "case"), full_but(QUICK, itertools.product(VARIANTS, CASES))
)
def test_same_tokens(drafting: Factory, alone: Factory, name: str, case: str) -> None:
    expected = alone(case)
    assert CASES[case](drafting(VARIANTS[name])) == expected


@pytest.mark.parametrize(
    "name", ["cp-short", "cp-recurrent-longer", "cp-full-short", "dynamo-short"]
)
def test_draft_vocabulary_is_a_part_of_the_lm_head(
    drafting: Factory, name: str
) -> None:
    """Its logits are those of the whole at its tokens, and nothing else is drafted."""
    llm = drafting(VARIANTS[name])
    speculator = drafter_of(llm)
    hidden = torch.randn(5, 64)
    vocabulary = speculator.drafter.vocabulary
    whole = speculator.target.lm_head.logits(hidden)
    torch.testing.assert_close(
        vocabulary.logits(hidden), whole[:, vocabulary.token_ids], rtol=0, atol=1e-5
    )
    assert vocabulary.entries(vocabulary.token_ids).tolist() == list(
        range(len(vocabulary.token_ids))
    )
    with drafts_of(llm) as drafted:
        CASES["batch_1"](llm)
    tokens = {token for step in drafted for row in step for token in row}
    # 0 takes the place of an invalid draft
    assert tokens and tokens <= {0, *vocabulary.token_ids.tolist()}


@contextlib.contextmanager
def drafts_of(llm: Any) -> Iterator[list[list[list[int]]]]:
    """The draft IDs [requests][K] of each step within."""
    speculator = drafter_of(llm)
    drafted = []
    stock = speculator.propose

    def propose(*args: Any, **kwargs: Any) -> Any:
        drafts = stock(*args, **kwargs)
        drafted.append(drafts.tolist())
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator, "propose", propose)
        yield drafted


HEADS = ["cp", "cp-full", "cp-short", "dynamo", "dynamo-2", "dynamo-short"]
HEADS += [
    "cp-recurrent",
    "cp-layers",
    "cp-recurrent-longer",
    "recurrent",
    "recurrent-short",
]


@pytest.mark.parametrize("name", HEADS)
def test_heads_draft_and_are_accepted(drafting: Factory, name: str) -> None:
    """Heads fitted to what the model says are right at times, and wrong at times."""
    llm = drafting(VARIANTS[name])
    with counting(llm) as seen:
        CASES["batch_16"](llm)
    assert 0.1 < seen["accepted"] / seen["drafted"] < 1


@pytest.mark.parametrize("drafts", [False, True])
def test_thinking_budget(engine: Factory, drafts: bool) -> None:
    """The end of thinking is forced on the request whose budget ran out, and on no other."""
    reasoning = ReasoningConfig(reasoning_start_str="<", reasoning_end_str=">")
    begin, end = (
        tiny.make_tokenizer().encode(text, add_special_tokens=False) for text in "<>"
    )
    requests = [
        {"prompt_token_ids": [*request["prompt_token_ids"], *begin]}
        for request in prompts(3, 20)
    ]
    settings = [greedy(extra_args={"ppd_draft": drafts}) for _ in requests]
    settings[1].thinking_token_budget = 6
    outputs = generate(
        engine(VARIANTS["middle"], reasoning_config=reasoning), requests, settings
    )
    assert outputs == generate(engine(reasoning_config=reasoning), requests, settings)
    assert [tokens.index(*end) if end[0] in tokens else None for tokens in outputs] == [
        None,
        6,
        None,
    ]


def test_prefix_cache_hits(engine: Factory, drafting: Factory) -> None:
    """Hits are as many as without speculation, and what is generated from them is the same."""
    expected = after_a_prefix(engine(enable_prefix_caching=True))
    for name in ("middle", "cp", "dynamo"):
        assert (
            after_a_prefix(drafting(VARIANTS[name], enable_prefix_caching=True))
            == expected
        )


def test_prefix_cache_hits_hold_the_heads_history(drafting: Factory) -> None:
    """DynaMo's drafts after a hit are those without one: the blocks hold the KV of the
    heads' layers, too.
    """
    llm = drafting(VARIANTS["dynamo"], enable_prefix_caching=True)
    request = {"prompt_token_ids": [(11 * j + 5) % 250 + 2 for j in range(100)]}
    runs = []
    for expected_hit in (0, 96):
        with drafts_of(llm) as drafted:
            output = llm.generate([request], greedy(), use_tqdm=False)[0]
        assert output.num_cached_tokens == expected_hit
        runs.append(drafted[-30:])  # those after a chunk of the prompt are nobody's
    assert runs[0] == runs[1]


ENGINES = ("middle", "cp", "dynamo", "dynamo-cut-off")


@pytest.mark.parametrize("name", ENGINES)
def test_preemption(
    engine: Factory, alone: Factory, drafting: Factory, name: str
) -> None:
    """A KV cache too small for the batch: requests are evicted in mid-decode and resumed."""
    small = {
        "kv_cache_memory_bytes": 12 * 2 * 6 * 2 * 32 * 32 * 4,
        "enable_prefix_caching": True,
    }
    expected = alone("batch_16", **small)
    llm = drafting(VARIANTS[name], **small)
    assert CASES["batch_16"](llm) == expected
    assert llm.counts["preempted"] > 0 and engine(**small).counts["preempted"] > 0


@pytest.mark.parametrize("name", full_but({"middle"}, ENGINES))
def test_compiled(alone: Factory, drafting: Factory, name: str) -> None:
    """The default compilation mode: each stack is compiled by itself, before the first request."""
    expected = alone("batch_16"), alone("arrivals_and_aborts")
    llm = drafting(VARIANTS[name], enforce_eager=False)
    cut = getattr(drafter_of(llm).target, "cut", None)
    assert cut is None or all(part.compiled for part in cut.compiled)
    assert (CASES["batch_16"](llm), CASES["arrivals_and_aborts"](llm)) == expected
