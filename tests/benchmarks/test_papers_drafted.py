# SPDX-License-Identifier: Apache-2.0
"""`ppd bench tables` of CP heads and DynaMo: what is measured without engines against slower ways, and rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overfitted
import pytest
import tiny
import torch
from conftest import patterned_texts, write_texts

from vllm_ppd.benchmarks.papers import PaperTable, cp, dynamo, dynamo_quality
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.cp_times import forward_times
from vllm_ppd.benchmarks.papers.likelihood import SameQuality, mean_log_prob, same_quality, win_rate
from vllm_ppd.benchmarks.papers.ngrams import _CachedStates, emit
from vllm_ppd.benchmarks.papers.options import TablesOptions
from vllm_ppd.benchmarks.papers.published import CP, DYNAMO
from vllm_ppd.benchmarks.papers.run import make_tables
from vllm_ppd.benchmarks.papers.tasks import Task
from vllm_ppd.heads.calibration.replay import accepted_by_position, replay
from vllm_ppd.heads.calibration.text import Texts, generate
from vllm_ppd.heads.dynamo.config import DynaMoConfig
from vllm_ppd.heads.dynamo.joint_settings import JointSettings
from vllm_ppd.heads.io import load_tensors, save_heads
from vllm_ppd.heads.training.tokens import Batch

K = 6


@pytest.fixture(scope="module")
def context(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Context:
    """A tiny model with CP heads of rank 1 (twice) and 2, and DynaMo heads of a short top-k."""
    folder = tmp_path_factory.mktemp("tables")
    data = write_texts(folder / "data.jsonl", patterned_texts(20, 30))
    ids = torch.randint(0, tiny.VOCAB, (16, 48), generator=torch.Generator().manual_seed(0)).tolist()
    heads = [
        overfitted.fit(
            tiny_model(),
            "cp",
            ids,
            folder / name,
            4,
            rank=rank,
            positions=3,
            num_speculative_tokens=2,
            condition=condition,
        )
        for name, rank, condition in (("cp-a", 2, "chain"), ("cp-b", 1, "none"), ("cp-c", 1, "none"))
    ]
    made = overfitted.fit(tiny_model(), "dynamo", ids, folder / "dynamo", 4, tokens=3, mask_entries=4000)
    config, tensors = load_tensors(str(made))
    assert isinstance(config, DynaMoConfig)
    save_heads(made, config.model_copy(update={"sampling": JointSettings(k=K)}), tensors)
    options = TablesOptions(
        model=str(tiny_model()), task=(f"patterns={data}",), heads=tuple(map(str, [*heads, made])),
        out=str(folder / "t.json"),
        prompts=6, prompt_tokens=8, new_tokens=20, rounds=1, kv_cache_gib=0.05, device="cpu", engine_dtype="float32",
    )  # fmt: skip
    return Context(options)


def rows_of(table: PaperTable) -> dict[str, tuple[Any, Any]]:
    return {row.label: (row.ours, row.theirs) for row in table.rows}


def test_what_the_papers_print() -> None:
    """Values that follow from one another do, and the gains that the papers' texts name."""
    for name, values in {**DYNAMO.SUITE, **DYNAMO.ARCHITECTURES}.items():
        first, second, third, two, three = values
        if first and second and two and "T1" not in name:  # with one head the paper's do not follow
            assert (first * second) ** (1 / 2) == pytest.approx(two, rel=0.05)
        if first and second and third and three:
            assert (first * second * third) ** (1 / 3) == pytest.approx(three, rel=0.01)
    assert CP.FROM_SCRATCH[8][1] / CP.FROM_SCRATCH[1][1] == pytest.approx(1.3, abs=0.02)
    assert CP.HEAD_ONLY[5][1] / CP.HEAD_ONLY[1][1] == pytest.approx(1.09, abs=0.01)
    for rank in (1, 3, 5):
        bare, head, full, _ = CP.FORWARD[rank]
        assert bare and head and bare + head == pytest.approx(full)


def test_accepted_by_position_adds_up() -> None:
    accept, lengths = torch.rand(3, 9, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([10, 10, 4])
    found = replay(accept, lengths)
    places = accepted_by_position(accept, lengths)
    assert sum(places) == pytest.approx(found.accepted / found.cycles) and places == sorted(places, reverse=True)
    assert accepted_by_position(accept * torch.tensor([0.0, 1.0, 1.0]), lengths) == [0, 0, 0]


def test_cp_rows(context: Context) -> None:
    rows = rows_of(cp.head_only(context))
    assert list(rows) == [
        "Rank 1 (cp-b), patterns",
        "Rank 1 (cp-c), patterns",
        "Rank 2 reading chain, patterns",
        "Rank 3",
        "Rank 5",
    ]
    assert rows["Rank 1 (cp-b), patterns"][1][:2] == (2.07, 1.52) and rows["Rank 1 (cp-c), patterns"][1] is None
    assert rows["Rank 2 reading chain, patterns"][1] is None and rows["Rank 3"] == (
        None,
        (1.88, 1.64, None, None, None, None),
    )
    ours, _ = rows["Rank 2 reading chain, patterns"]
    assert ours[1] == pytest.approx(1 + ours[3] + ours[4]) and ours[5] == pytest.approx(3 * ours[0])


@pytest.mark.parametrize("place", [0, -1], ids=["rank 1", "rank 2, chain"])
def test_cp_loss_is_that_of_the_joint(context: Context, place: int) -> None:
    heads = cp.given(context)[place]
    target, n = heads.calibration.target, heads.config.positions
    total, count = 0.0, 0
    for batch in context.windows(context.task):
        states = target.model(batch.input_ids, output_hidden_states=True).hidden_states[-1]
        for row, ids in zip(states, batch.input_ids, strict=True):
            following = ids.unfold(0, n, 1)[1:]
            row, lead = row[: len(following)], heads.head.lead
            seen = target.embed(following[:, : n - 1]) if lead else None
            found, _ = heads.head.log_likelihood(row, following[:, lead:], target.unembedding, None, seen)
            own = (row @ target.unembedding.T).log_softmax(-1).gather(1, following[:, :lead])  # the target's
            total, count = total - float(found.detach().sum() + own.sum()), count + len(following)
    assert cp.loss(context, heads, context.task) == pytest.approx(total / count / n, abs=1e-3)


def test_forward_pass(context: Context) -> None:
    heads = {h.label: h.head for h in cp.given(context)}
    calibration = cp.given(context)[0].calibration
    times = forward_times(calibration.target, heads, calibration.autocast)
    assert set(times.head) == set(times.full) == set(heads)
    assert all(0 < times.head[name] < times.full[name] for name in heads)
    rows = rows_of(cp.forward_pass(context))
    assert rows["Barebone"][0][:2] == [rows["Rank 2 reading chain"][0][0], None] and rows["Rank 5"][0] is None


def test_states_of_texts_of_unequal_pace(context: Context) -> None:
    """Through a cache with holes, every head reads what it reads of the whole texts at once."""
    measures = dynamo_quality.measures_of(context, context.heads("dynamo")[0])
    ids = torch.randint(0, tiny.VOCAB, (3, 30), generator=torch.Generator().manual_seed(1))
    states_of, at = _CachedStates(measures, 3), torch.zeros(3, dtype=torch.int64)
    for counts in ((8, 8, 8), (1, 3, 2), (3, 1, 0), (2, 2, 3)):
        size = torch.tensor(counts)
        columns = torch.arange(int(size.max()))
        real = columns < size[:, None]
        found = states_of(ids.gather(1, at[:, None] + columns), real)
        at += size
        for row in range(3):
            if counts[row]:
                text = Texts(ids[row : row + 1, : at[row] + 1], 1, at[row : row + 1], 0.0)
                ((_, whole),) = text.batches(1)
                for head, states in zip(found, measures.states(whole), strict=True):
                    torch.testing.assert_close(head[row], states[-1], atol=1e-4, rtol=1e-4)


def test_ngrams_are_as_long_as_thresholds_allow(context: Context) -> None:
    folder = context.heads("dynamo")[0]
    measures, (prompts, _) = dynamo_quality.measures_of(context, folder), context.task.padded(context.target.device)

    def write(settings: JointSettings, eps_b: float, rows: int = len(prompts)) -> Any:
        generator = torch.Generator().manual_seed(0)
        return emit(measures, prompts[:rows], 9, settings, torch.full((rows,), eps_b), 0.7, generator)

    plain = JointSettings(k=K, alpha_c=0.0, repetition_penalty=1.1)
    assert write(plain, 0.0).shares() == [0, 0, 1] and write(plain, 0.0).tokens_a_pass() == 3
    assert write(plain, 1.0).shares() == [1, 0, 0]
    between = write(plain, 0.3)
    assert 1 < between.tokens_a_pass() < 3 and between.part(slice(0, 2)).texts.ids.shape == (2, 8 + 9)
    # With the best token alone, one at a time, it is the target's greedy text.
    greedy = context.texts(context.task)
    best = write(JointSettings(k=1, alpha_c=0.0), 1.0).texts
    for row, length in enumerate(best.lengths.tolist()):
        assert best.generated[row, :length].tolist() == greedy.generated[row, :length].tolist()
    ids, starts = Task("unequal", "", [[5], [9, 3, 4, 8, 7], [1, 2, 3]]).padded(prompts.device)
    settings, generator = JointSettings(k=1, alpha_c=0.0), torch.Generator()
    best = emit(measures, ids, 6, settings, torch.ones(3), 0.7, generator, starts).texts
    assert best.generated.tolist() == generate(context.target, ids, 6, starts=starts).generated.tolist()


def test_likelihood_of_texts(context: Context) -> None:
    calibration = context.calibration(context.heads("dynamo")[0])
    target, texts = calibration.target, context.sampled(context.task)
    found = mean_log_prob(target, texts, 4, calibration.autocast)
    logits = target.model(texts.ids).logits.log_softmax(-1)
    for row, length in enumerate(texts.lengths.tolist()):
        at = range(texts.prompt, texts.prompt + length)
        slow = sum(float(logits[row, i - 1, texts.ids[row, i]]) for i in at) / length
        assert float(found[row]) == pytest.approx(slow, abs=1e-4)


def test_quality() -> None:
    ours, base = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([[-2.0, -1.0, -3.0], [-2.0, -3.0, -1.0]])
    assert win_rate(ours, base) == 3 / 2 and win_rate(ours, base - 10) is None
    assert same_quality([(1, 1.5), (2, 1.0), (3, 0.5)], 3) == pytest.approx((2.0, False))
    assert same_quality([(1, 1.5), (1.5, 1.25)], 3) == pytest.approx((2.0, True))
    assert same_quality([(1, 1.5), (1.5, 1.4)], 3) == SameQuality(3, True)
    assert same_quality([(1, 0.8), (2, 0.2)], 3) is None and same_quality([(1, 1.0)], 3) is None


def test_dynamo_tables(context: Context) -> None:
    suite, variants = rows_of(dynamo.suite(context)), rows_of(dynamo.architectures(context))
    (label,) = (name.removesuffix(", patterns") for name in list(suite)[1:2])
    assert label.endswith("-T3, given heads")
    ours, _ = suite[f"{label}, patterns"]
    assert suite["given model, patterns"][0][0] == ours[0] and suite["DynaMo-77M-T3"][1][2] == 262.0
    fewer, _ = variants[f"{label}, without head 3"]
    assert fewer == [ours[0], ours[1], None, ours[3], None]
    ends = rows_of(dynamo.dynamic(context))
    assert ends[f"{label}, eps_b = 1"][0] == pytest.approx([ours[0], 1.0], rel=0.2)
    assert ends[f"{label}, eps_b = 1"][0][1] == 1 and ends["DynaMo-7.3B-T3, eps_b = 0"][1] == [25.8, 3.0]


def test_dynamic_perplexity_goes_on_at_the_next_document(context: Context) -> None:
    """A packed window of three documents counts what the documents count by themselves."""
    measures = dynamo_quality.measures_of(context, context.heads("dynamo")[0])
    settings, eps_b, lengths = JointSettings(k=K), (0.0, 0.3, 1.0), (9, 14, 7)
    generator = torch.Generator().manual_seed(2)
    alone = [torch.randint(0, tiny.VOCAB, (1, length), generator=generator) for length in lengths]
    places = [torch.arange(length)[None] for length in lengths]
    packed = [Batch(torch.cat(alone, dim=1), torch.cat(places, dim=1))]
    found = measures.dynamic_perplexity(packed, settings, eps_b)
    assert found == measures.dynamic_perplexity(list(map(Batch, alone, places)), settings, eps_b)
    # One token at a time, that is PPL_1 of the positions that have as many tokens after them as there are heads.
    one = measures.perplexities(packed)
    assert found[-1]["tokens_a_pass"] == 1 and found[-1]["ppl_d"] == pytest.approx(one["ppl_n"][0], rel=1e-3)


def test_dynamo_figures_of_texts(context: Context) -> None:
    figure = dynamo_quality.shares(context)
    rows = rows_of(figure)
    assert rows["eps_b = 1"] == ([1, 0, 0], [1, 0, 0]) and rows["eps_b = 0.5"][1] is None
    assert all(sum(ours) == pytest.approx(1) for ours, _ in rows.values())
    found = dynamo_quality.ablation(context)
    curves = {curve.label for curve in found.curves}
    assert curves == set(dynamo_quality.SCHEMES)
    values, published = rows_of(found)["CO + AT + G-3, eps_b = 0.5"]
    assert published == (2.57, 0.98, None, None) and 1 <= values[0] <= 3 and values[2] > 0
    assert "likelihood" in found.note
    free, _ = rows_of(found)["vanilla, eps_b = 0"]
    assert free[0] == 3


@pytest.mark.full
def test_cp_speeds(context: Context, tmp_path: Path) -> None:
    ours = rows_of(speeds(context, tmp_path, "cp-1", context.heads("cp")[0]))["Rank 2 reading chain, patterns"][0]
    assert ours[2] > 0 and ours[3] > 0


@pytest.mark.full
def test_dynamo_speeds(context: Context, tmp_path: Path) -> None:
    rows = rows_of(speeds(context, tmp_path, "dynamo-4", context.heads("dynamo")[0]))
    (verified,) = (ours for label, (ours, _) in rows.items() if label.endswith(", verified"))
    assert verified[4] > 0 and 0 < verified[1] < verified[2]
    assert all(ours[4] > 0 for label, (ours, _) in rows.items() if "unverified" in label)
    assert rows["DynaMo-7.3B-T3"][1][:2] == ["6.9B", 0.0587]


def speeds(context: Context, folder: Path, key: str, heads: str) -> PaperTable:
    """A table whose engines all ran."""
    out = folder / "speeds.json"
    changes = {"out": str(out), "only": (key,), "heads": (heads,)}
    (table,), left_out = make_tables(context.options.model_copy(update=changes))
    turns = json.loads((folder / "speeds.turns.json").read_text())
    assert not left_out and all(run["finished"] and not run["failures"] for run in turns["runs"])
    return table
