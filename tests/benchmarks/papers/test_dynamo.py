# SPDX-License-Identifier: Apache-2.0
"""DynaMo's tables: perplexities, n-grams written by Algorithm 1 against slower ways, quality, engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from vllm_ppd.benchmarks.papers import dynamo
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.dynamo import SameQuality, mean_log_prob, measures_of, same_quality, win_rate
from vllm_ppd.benchmarks.papers.ngrams import CachedStates, emit
from vllm_ppd.benchmarks.papers.run import make_tables
from vllm_ppd.benchmarks.papers.table import PaperTable
from vllm_ppd.benchmarks.papers.tasks import Task
from vllm_ppd.heads.calibration.text import Texts, generate
from vllm_ppd.heads.dynamo.config import JointSettings
from vllm_ppd.heads.training.tokens import Batch

TOP_K = 6  # of the heads


def rows_of(table: PaperTable) -> dict[str, tuple[Any, Any]]:
    return {row.label: (row.ours, row.theirs) for row in table.rows}


def test_published_joint_perplexities_follow_from_the_heads() -> None:
    for first, second, third, two, three in dynamo.theirs.SUITE.values():
        if first and second and two:
            assert (first * second) ** (1 / 2) == pytest.approx(two, rel=0.05)
        if first and second and third and three:
            assert (first * second * third) ** (1 / 3) == pytest.approx(three, rel=0.01)


def test_states_of_texts_of_unequal_pace_are_those_of_whole_texts(drafted: Context) -> None:
    """Through a cache with holes, every head reads what it reads of the whole texts at once."""
    measures = measures_of(drafted, drafted.heads("dynamo")[0])
    ids = torch.randint(0, tiny.VOCAB, (3, 30), generator=torch.Generator().manual_seed(1))
    states_of, at = CachedStates(measures, 3), torch.zeros(3, dtype=torch.int64)
    for counts in ((8, 8, 8), (1, 3, 2), (3, 1, 0), (2, 2, 3)):
        size = torch.tensor(counts)
        columns = torch.arange(int(size.max()))
        by_head = states_of(ids.gather(1, at[:, None] + columns), columns < size[:, None])
        at += size
        for row in range(3):
            if counts[row]:
                text = Texts(ids[row : row + 1, : at[row] + 1], 1, at[row : row + 1], 0.0)
                ((_, whole),) = text.batches(1)
                for head, states in zip(by_head, measures.states(whole), strict=True):
                    torch.testing.assert_close(head[row], states[-1], atol=1e-4, rtol=1e-4)


def test_ngrams_are_as_long_as_thresholds_allow(drafted: Context) -> None:
    measures = measures_of(drafted, drafted.heads("dynamo")[0])
    prompts, _ = drafted.task.padded(drafted.target.device)

    def write(settings: JointSettings, eps_b: float) -> Any:
        generator = torch.Generator().manual_seed(0)
        return emit(measures, prompts, 9, settings, torch.full((len(prompts),), eps_b), 0.7, generator)

    plain = JointSettings(k=TOP_K, alpha_c=0.0, repetition_penalty=1.1)
    assert write(plain, 0.0).tokens_a_pass() == 3 and write(plain, 1.0).tokens_a_pass() == 1
    between = write(plain, 0.3)
    assert 1 < between.tokens_a_pass() < 3 and between.rows(slice(0, 2)).texts.ids.shape == (2, 8 + 9)


def test_the_best_token_alone_is_the_targets_greedy_text(drafted: Context) -> None:
    measures, target = measures_of(drafted, drafted.heads("dynamo")[0]), drafted.target
    ids, starts = Task("unequal", "", [[5], [9, 3, 4, 8, 7], [1, 2, 3]]).padded(target.device)
    settings = JointSettings(k=1, alpha_c=0.0)
    best = emit(measures, ids, 6, settings, torch.ones(3), 0.7, torch.Generator(), starts).texts
    greedy = generate(target, ids, 6, starts=starts)
    for row, length in enumerate(best.lengths.tolist()):
        assert best.generated[row, :length].tolist() == greedy.generated[row, :length].tolist()


def test_likelihood_is_the_targets_own(drafted: Context) -> None:
    texts = drafted.sampled(drafted.task)
    means = mean_log_prob(drafted.calibration(drafted.heads("dynamo")[0]), texts)
    logits = drafted.target.model(texts.ids).logits.log_softmax(-1)
    for row, length in enumerate(texts.lengths.tolist()):
        at = range(texts.prompt, texts.prompt + length)
        slow = sum(float(logits[row, i - 1, texts.ids[row, i]]) for i in at) / length
        assert float(means[row]) == pytest.approx(slow, abs=1e-4)


def test_quality_is_where_the_regression_is_one() -> None:
    ours, base = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([[-2.0, -1.0, -3.0], [-2.0, -3.0, -1.0]])
    assert win_rate(ours, base) == 3 / 2 and win_rate(ours, base - 10) is None
    assert same_quality([(1, 1.5), (2, 1.0), (3, 0.5)], 3) == pytest.approx((2.0, False))
    assert same_quality([(1, 1.5), (1.5, 1.25)], 3) == pytest.approx((2.0, True))
    assert same_quality([(1, 1.5), (1.5, 1.4)], 3) == SameQuality(3, True)
    assert same_quality([(1, 0.8), (2, 0.2)], 3) is None and same_quality([(1, 1.0)], 3) is None


def test_perplexities_stand_beside_the_papers(drafted: Context) -> None:
    suite, folder = rows_of(dynamo.suite(drafted)), drafted.heads("dynamo")[0]
    label = dynamo.name(drafted, folder)
    assert label == "DynaMo-T3, dynamo"
    ours, _ = suite[f"{label}, patterns"]
    assert list(ours[:3]) == measures_of(drafted, folder).perplexities(drafted.windows(drafted.task))["ppl_n"]
    assert suite["given model, patterns"][0][0] == ours[0] and suite["DynaMo-77M-T3"][1][2] == 262.0


def test_dynamic_perplexity_goes_on_at_the_next_document(drafted: Context) -> None:
    """A packed window of three documents counts what the documents count by themselves."""
    measures = measures_of(drafted, drafted.heads("dynamo")[0])
    settings, eps_b, lengths = JointSettings(k=TOP_K), (0.0, 0.3, 1.0), (9, 14, 7)
    generator = torch.Generator().manual_seed(2)
    alone = [torch.randint(0, tiny.VOCAB, (1, length), generator=generator) for length in lengths]
    places = [torch.arange(length)[None] for length in lengths]
    packed = [Batch(torch.cat(alone, dim=1), torch.cat(places, dim=1))]
    points = measures.dynamic_perplexity(packed, settings, eps_b)
    assert points == measures.dynamic_perplexity(list(map(Batch, alone, places)), settings, eps_b)
    # One token at a time, that is PPL_1 of the positions that have as many tokens after them as there are heads.
    first = measures.perplexities(packed)["ppl_n"][0]
    assert points[-1]["tokens_a_pass"] == 1 and points[-1]["ppl_d"] == pytest.approx(first, rel=1e-3)


@pytest.mark.full
def test_engines_are_measured(drafted: Context, tmp_path: Path) -> None:
    changes = {"out": str(tmp_path / "speeds.json"), "only": ("dynamo-4",), "heads": (drafted.heads("dynamo")[0],)}
    (table,), left_out = make_tables(drafted.options.model_copy(update=changes))
    turns = json.loads((tmp_path / "speeds.turns.json").read_text())
    assert not left_out and all(run["finished"] and not run["failures"] for run in turns["runs"])
    rows = rows_of(table)
    (verified,) = (ours for label, (ours, _) in rows.items() if label.endswith(", verified"))
    assert verified[3] > 0
    unverified = {label: ours for label, (ours, _) in rows.items() if "unverified" in label}
    assert all((ours[3] is not None) == label.endswith(("= 0", "= 0.5")) for label, ours in unverified.items())
    assert all(1 <= float(ours[0].rstrip("x")) <= 3 for ours in unverified.values())
