# SPDX-License-Identifier: Apache-2.0
"""`ppd bench tables`: what is measured without engines against slower counts, what is kept, and how tables read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import patterned_texts, write_texts

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.harness.options import named
from vllm_ppd.benchmarks.harness.session import Stopped
from vllm_ppd.benchmarks.papers import Missing, PaperTable, Row, Verdict, ppd
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.options import TablesOptions
from vllm_ppd.benchmarks.papers.paradecode_texts import predictions, unverified
from vllm_ppd.benchmarks.papers.published import PARADECODE, PPD, rates_of
from vllm_ppd.benchmarks.papers.render import render
from vllm_ppd.benchmarks.papers.run import chosen, make_tables
from vllm_ppd.benchmarks.papers.tasks import Task
from vllm_ppd.heads.calibration.text import generate
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.vllm_plugins.cli.main import main

EXITS = (1, 2, 3)


@pytest.fixture(scope="module")
def options(
    tiny_model: Callable[..., Path], heads_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., TablesOptions]:
    """options(**changes): of tables of a tiny model with early heads."""
    folder = tmp_path_factory.mktemp("tables")
    data = write_texts(folder / "data.jsonl", patterned_texts(20, 30))
    heads = heads_folder(EXITS, 0.3)

    def get(**changes: Any) -> TablesOptions:
        small = {
            "prompts": 4, "prompt_tokens": 8, "new_tokens": 16, "rounds": 1, "kv_cache_gib": 0.05, "device": "cpu",
        }  # fmt: skip
        given = {
            "model": str(tiny_model()),
            "task": (f"patterns={data}",),
            "heads": (str(heads),),
            "out": str(folder / "t.json"),
        }
        return TablesOptions(**{**given, **small, **changes})

    return get


@pytest.fixture(scope="module")
def context(options: Callable[..., TablesOptions]) -> Context:
    return Context(options())


def value(table: PaperTable, label: str, column: int) -> Any:
    (row,) = (row for row in table.rows if row.label == label)
    return (row.ours or row.theirs or ())[column]


def test_what_the_papers_print() -> None:
    """Figures that PPD's section 4.3 quotes follow from its tables by its equations."""
    squad, wmt = rates_of("SQUAD"), rates_of("WMT EN-FR")
    assert round(1 - squad[20, 5, "Y"][-1] / 2, 3) == 0.629
    assert round(1 - wmt[20, 1, "N"][-1] / 2, 3) == 0.892
    for rates in (squad, wmt, rates_of("CNN/DM")):
        assert len(rates) == 30 and all(len(values) == 9 for values in rates.values())
        # Total is the mean of eight ranges of one width, but for a misprint of the paper's.
        off = [key for key, (*parts, total) in rates.items() if abs(sum(parts) / 8 - total) > 1e-3]
        assert len(off) <= 1, off
    best = max(PARADECODE.SPEEDUPS.values())
    assert best == PARADECODE.SPEEDUPS["ParaDecode (Ours), CodeLlama-34B"]


def test_match_rates_are_those_of_a_slow_count(context: Context) -> None:
    table = ppd.match_rates(context)
    calibration = context.calibration(context.heads("early")[0])
    target, texts = calibration.target, context.texts(context.task)
    heads = ppd.early_heads(context)
    depth = tiny.LAYERS
    assert all(f"of {depth}" in column for column in table.columns)
    column = PPD.LAYERS.index(20)
    layer = min(EXITS, key=lambda layer: abs(layer - depth / 2))
    states = target.model(texts.ids, output_hidden_states=True).hidden_states[layer]
    for form, read in (("N", target.norm(states)), ("Y", heads(target.norm(states), layer))):
        best = (read @ target.unembedding.T).topk(3).indices[:, texts.prompt - 1 : -1]
        hit = (best == texts.generated[..., None]).any(-1) & texts.valid()
        share = float(hit.sum() / texts.valid().sum())
        assert value(table, f"patterns, k = 3, {form}", column) == pytest.approx(share)


def test_figures_follow_from_match_rates(context: Context) -> None:
    figure = ppd.trade_off(3, context)
    assert value(figure, 'SQUAD+"tr", k = 5', 0) == pytest.approx(4.973, abs=1e-3)
    assert value(figure, "WMT, k = 1", 0) == pytest.approx(1.561, abs=1e-3)
    curves = {curve.label: curve for curve in figure.curves}
    assert len(curves) == 8 and len(curves['patterns+"tr"'].ours or ()) == 3
    per_token = ppd.trade_off(4, context)
    time, latency = value(figure, "patterns, k = 3", 0), value(figure, "patterns, k = 3", 1)
    assert value(per_token, "patterns, k = 3", 0) == pytest.approx(time * latency)


def test_positions_are_of_the_task_that_stands_for_the_data_set(options: Callable[..., TablesOptions]) -> None:
    """Tables 6 to 8 are of a task each: what stands for no data set is in none of them."""
    (path,) = (named(task)[1] for task in options().task)
    context = Context(options(task=(f"patterns={path}", f"summarization={path}")))
    table = ppd.by_position("CNN/DM", 8, context)
    ours = table.rows[0].ours
    assert ours is not None and ours[0] == ours[-1] and set(ours[1:-1]) == {None}  # beyond the texts
    assert ours[-1] == value(ppd.match_rates(context), "summarization, k = 1, N", 0)
    for data_set, number in (("SQUAD", 6), ("WMT EN-FR", 7)):
        with pytest.raises(Missing, match=f"no task stands for {data_set}: give --task .*=FILE"):
            ppd.by_position(data_set, number, context)


def test_early_predictions(context: Context) -> None:
    calibration = context.calibration(context.heads("early")[0])
    found = predictions(calibration, ppd.early_heads(context), context.texts(context.task), 2)
    rate, rejected = found.rates(0.0)
    assert rate == 1 and rejected == pytest.approx(1 - ppd.matches(context, context.task).rate(1, 2, 1))
    fewer, _ = found.rates(float(found.confidence.median()))
    assert 0 < fewer < 1 and found.rates(1.0) == (0, None)


def test_unverified_text_of_the_last_layer_is_the_targets(context: Context) -> None:
    calibration = context.calibration(context.heads("early")[0])
    last = EarlyHeads((tiny.LAYERS,), calibration.target.hidden_size)
    assert unverified(calibration, last, context.texts(context.task), tiny.LAYERS) == 1
    ids, starts = Task("unequal", "", [[5], [9, 3, 4, 8, 7], [1, 2, 3]]).padded(calibration.target.device)
    texts = generate(calibration.target, ids, 6, starts=starts)
    assert unverified(calibration, last, texts, tiny.LAYERS) == 1
    assert unverified(calibration, ppd.early_heads(context), context.texts(context.task), 1) < 1


def test_tables_are_kept(options: Callable[..., TablesOptions], tmp_path: Path) -> None:
    out = tmp_path / "tables.json"

    def run(**changes: Any) -> list[str]:
        make_tables(options(out=str(out), **changes))
        return [entry["key"] for entry in json.loads(out.read_text())["tables"]]

    assert run(only="ppd-2") == ["ppd-2"]
    first = json.loads(out.read_text())["tables"][0]
    assert first["versions"] and first["identity"]["options"]["prompts"] == 4
    assert run(only="ppd-2,ppd-fig-3") == ["ppd-2", "ppd-fig-3"]
    assert run(only="ppd-2", seed=1) == ["ppd-2", "ppd-fig-3", "ppd-2"]
    assert run(only="ppd-2", again=True) == ["ppd-2", "ppd-fig-3", "ppd-2", "ppd-2"]
    assert json.loads(out.read_text())["tables"][0] == first
    (table,), _ = make_tables(options(out=str(out), only="ppd-fig-3"))
    assert table == PaperTable.from_json(json.loads(json.dumps(table.to_json())))


def test_stopped_run_keeps_its_tables(
    options: Callable[..., TablesOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: Context) -> PaperTable:
        raise KeyboardInterrupt

    monkeypatch.setitem(ppd.TABLES, "ppd-5", stop)
    given = options(out=str(tmp_path / "tables.json"), only="ppd-2,ppd-5,ppd-6")
    with pytest.raises(Stopped, match=r"stopped at ppd-5; 1 new tables are kept in .*tables\.json"):
        make_tables(given)
    assert [entry["key"] for entry in json.loads(Path(given.out).read_text())["tables"]] == ["ppd-2"]


def test_missing_heads_and_bad_names(options: Callable[..., TablesOptions], tmp_path: Path, capsys: Any) -> None:
    none = options(heads=(), only="ppd-2", out=str(tmp_path / "none.json"))
    tables, left_out = make_tables(none)
    assert not tables and "ppd train early" in left_out["ppd-2"] and not Path(none.out).exists()
    with pytest.raises(BenchError, match="--only ppd-9: no such table; there are ppd-2, "):
        chosen(("ppd-9",))
    assert list(chosen(("paradecode",))) == [f"paradecode-{name}" for name in ("1", "2", "3", "fig-6")]
    other = tmp_path / "other.json"
    other.write_text('{"benchmark": "decode"}')
    flags = ["--model", none.model, "--task", *none.task, "--only", "ppd-2", "--out", str(other)]
    assert main(["bench", "tables", *flags]) != 0
    assert "no file of tables" in capsys.readouterr().err


def test_data_too_short_for_prompts_is_one_line(
    options: Callable[..., TablesOptions], tmp_path: Path, capsys: Any
) -> None:
    given = options()
    short = write_texts(tmp_path / "short.jsonl", ["a", "b"])
    flags = ["--model", given.model, "--task", str(short), "--heads", *given.heads, "--out", str(tmp_path / "t.json")]
    assert main(["bench", "tables", "--only", "ppd-2", "--device", "cpu", *flags]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("ppd: error: the data holds 0 prompts of 64 tokens")


def test_render() -> None:
    rows = (Row("same", [1.0, None], [0.5, "x"]), Row("apart", [None, 0.25], [2.0, None]))
    table = PaperTable("p-1", "P", "Table 1: things", ("a", "b"), rows, "Note.", ("{:.1f}", "{:.0%}"), {"rounds": 3},
                       claims=(Verdict("It rises", False, "1 to 0"),))  # fmt: skip
    text = render(table)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert cells[2:] == [["same", "ours", "1.0", "-"], ["", "paper", "0.5", "x"], ["apart", "both", "2.0", "25%"]]
    assert text.startswith("### P, Table 1: things (`p-1`)") and text.endswith(
        "Note. Settings: rounds 3.\n\n- It rises: does not hold (1 to 0)."
    )
    with pytest.raises(ValueError, match="1 values for 2 columns"):
        PaperTable("p-1", "P", "Table 1", ("a", "b"), (Row("short", [1.0]),), "")


@pytest.mark.full
def test_tables_of_speeds(
    options: Callable[..., TablesOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PARADECODE, "GAMMAS", (0.0, 1.0))  # an engine each
    given = options(out=str(tmp_path / "speeds.json"), only="paradecode", engine_dtype="float32", new_tokens=24)
    tables, left_out = make_tables(given)
    assert not left_out and [table.key for table in tables] == [f"paradecode-{n}" for n in ("1", "2", "3", "fig-6")]
    by_key = {table.key: table for table in tables}
    assert value(by_key["paradecode-2"], "ParaDecode (Ours), given model", 0) == "100.00%"
    assert by_key["paradecode-1"].columns[0] == "patterns"
    assert value(by_key["paradecode-3"], "w/o verification step", 0) < 1
    assert value(by_key["paradecode-fig-6"], "gamma = 0", 1) == 1
    turns = json.loads((tmp_path / "speeds.turns.json").read_text())
    assert all(run["finished"] for run in turns["runs"])
