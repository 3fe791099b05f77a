# SPDX-License-Identifier: Apache-2.0
"""`ppd plan`: predictions against figures worked out by hand, on hand-made calibrations."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, Factory
from heads_folders import blank_tensors

from vllm_ppd.heads.base import LARGEST_BATCH, HeadsConfig, TargetLayers
from vllm_ppd.heads.cp.config import CPConfig
from vllm_ppd.heads.early.config import EarlyConfig
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.io import save_heads
from vllm_ppd.heads.measured import Timed
from vllm_ppd.heads.planning.gate import without_gain
from vllm_ppd.heads.planning.machine import Weights, measured, roofline, weights_of
from vllm_ppd.heads.planning.options import PlanOptions
from vllm_ppd.heads.planning.plan import Plan, make_plan
from vllm_ppd.heads.planning.predict import Drafting
from vllm_ppd.heads.planning.recommend import drafts_by_batch_size, recommend
from vllm_ppd.heads.planning.report import command, report
from vllm_ppd.heads.quote import quoted
from vllm_ppd.vllm_plugins.cli.main import main
from vllm_ppd.vllm_plugins.draft_length.costs import CostTable, MeasuredCosts

LAYERS = 10
TARGET = TargetLayers(model_type="llama", hidden_size=8, vocab_size=64, num_hidden_layers=LAYERS)
# Flat up to 4 rows, then a millisecond for each row more; an LM head is worth two layers.
TIMES = {"layer": {"1": 1e-3, "4": 1e-3, "8": 2e-3}, "lm_head": {"1": 2e-3, "4": 2e-3, "8": 4e-3}}


def counts(n: int, accepted: float) -> dict[str, float]:
    return {"cycles": 100.0, "drafts": 100.0, "drafted": 100.0 * n, "accepted": 100 * accepted, "length": 1 + accepted}


def early_parts(rate: float) -> dict[str, Any]:
    """Drafts at layers 2, 6 and 8 of which each is accepted with some probability; without heads half of it."""

    def of(p: float) -> dict[str, Any]:
        return {str(layer): [counts(n, sum(p**i for i in range(1, n + 1))) for n in (1, 2)] for layer in (2, 6, 8)}

    sampled = {"N": of(rate / 2), "Y": of(rate)}
    match = {str(k): {"N": [0.1, 0.3, 0.5], "Y": [0.2, 0.6, 0.9]} for k in (1, 3)}
    return {
        "timing": {"seconds": TIMES, "lm_head_share": 2 / 12},
        "matches": {"layers": [2, 6, 8], "match": match, "acceptance": {"greedy": sampled, "T 0.8": sampled}},
    }


def cp_parts(accepted: float) -> dict[str, Any]:
    by = {"by_drafts": [counts(1, accepted), counts(2, 1.5 * accepted)]}
    return {
        "timing": {"seconds": TIMES, "lm_head_share": 2 / 12},
        "acceptance": {"greedy": by, "T 0.8": by},
        "vocabulary": {"16": {"covers": 0.9, "by_drafts": [counts(1, accepted - 0.1)]}},
    }


def early_config(verifier: str = "the/target") -> EarlyConfig:
    return EarlyConfig(verifier=verifier, exit_layers=[2, 6, 8], num_speculative_tokens=3, target=TARGET)


def cp_config(rank: int = 1, **changes: Any) -> CPConfig:
    given: dict[str, Any] = {"token_counts": True, **changes}
    return CPConfig(verifier="the/target", positions=3, rank=rank, num_speculative_tokens=2, target=TARGET, **given)


@pytest.fixture
def folder(tmp_path: Path) -> Factory:
    """folder(config, parts): a heads folder with a hand-made calibration."""

    def get(config: HeadsConfig, parts: dict[str, Any], finished: bool = True) -> str:
        path = tmp_path / f"{config.kind}-{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        save_heads(path, config, blank_tensors(config))
        (path / "calibration.json").write_text(json.dumps({"finished": finished, "parts": parts}))
        return str(path)

    return get


@pytest.fixture
def early(folder: Factory) -> str:
    return folder(early_config(), early_parts(0.8))


def plan(*heads: str, **options: Any) -> Plan:
    return make_plan(PlanOptions(heads=heads, **options))


def test_early_drafting_by_hand(early: str) -> None:
    options = {"model": early, "exit_layer": 2, "num_speculative_tokens": 2}
    drafting = next(p.decoding for p in plan(early).predicted if p.decoding.options == options)
    # Batch 1, all flat: n l/L + 1 passes and n more reads of the LM head: (2 * 2 + 10 + 3 * 2) / 12 of a pass.
    assert drafting.seconds(1) == pytest.approx(20e-3)
    assert drafting.speedup(1) == pytest.approx((1 + 0.8 + 0.64) * 12 / 20)
    # Batch 2: 6 rows are verified, at 1.5 times the price; 2 rows are drafted at the old one.
    assert drafting.seconds(2) == pytest.approx((3 * 2 + 8 * 1.5 + 2 * 1.5 + 2 * 2) * 1e-3)
    # Three tokens through all layers, two reads of the LM head (a sixth of a pass each).
    assert drafting.compute == pytest.approx((3 + 2 / 6) / 2.44)


def test_memory_bound_cycles_are_those_of_the_recommendation(early: str) -> None:
    """One formula: what `ppd calibrate` recommends by is what `ppd plan` predicts at batch 1."""
    config = early_config()
    parts = config.parts.model_validate(early_parts(0.8))
    for predicted in plan(early).predicted:
        assert isinstance(predicted.decoding, Drafting)
        cycle = predicted.decoding.setting.cycle(LAYERS, 2 / 12)
        assert predicted.decoding.seconds(1) == pytest.approx(12e-3 * cycle)
    best = plan(early).best
    assert best is not None
    chosen = recommend(config, parts)
    assert best.decoding.options["exit_layer"] == chosen["default_exit_layers"][0]
    assert best.speedup == pytest.approx(chosen["predicted_speedup"], abs=1e-4)
    assert {s.trained for s in config.settings(parts, greedy=False)} == {True, False}


@pytest.mark.parametrize("accepted", [0.1, 0.6, 0.9])
def test_drafts_by_batch_size_are_the_best_ones(accepted: float) -> None:
    """Those of the recommended setting, none where none gains; of every batch size one range has it."""
    config = early_config()
    parts = config.parts.model_validate(early_parts(accepted))
    chosen = recommend(config, parts)
    ranges = drafts_by_batch_size(config, parts, chosen)
    assert ranges[0][0] == 1 and ranges[-1][1] == LARGEST_BATCH
    assert [first for first, *_ in ranges[1:]] == [last + 1 for _, last, _ in ranges[:-1]]
    of = {setting.drafts: setting for setting in config.settings(parts, greedy=False) if setting.trained and (
        setting.exit_layer == chosen["default_exit_layers"][0] and setting.drafts <= chosen["num_speculative_tokens"]
    )}  # fmt: skip
    for size in (1, 2, 3, 8, 64, 512):
        gains = {
            n: Drafting("ppd", {}, measured(Timed.model_validate(TIMES)), LAYERS, setting).speedup(size)
            for n, setting in of.items()
        }
        best = max(gains, key=gains.__getitem__)
        (drafts,) = (drafts for first, last, drafts in ranges if first <= size <= last)
        assert drafts == (best if gains[best] > 1 else 0)
    # Rows are dear from a few on here, so that large batches draft nothing, and small ones do where enough is accepted.
    assert ranges[-1][2] == 0 and (ranges[0][2] > 0) == (accepted > 0.5)


def test_transforms_are_part_of_the_price() -> None:
    """Each a tenth of a layer: one an early draft, one an expert and position of a CP head; none of untrained exits."""
    config = cp_config(rank=2)
    layers = []
    for transform in (0.0, 0.1):
        of_kinds = []
        for heads, parts in ((early_config(), early_parts(0.8)), (config, cp_parts(0.6))):
            parts["timing"]["transform_in_layers"] = transform
            of_kinds.append(list(heads.settings(heads.parts.model_validate(parts), greedy=False)))
        layers.append([[setting.layers for setting in settings] for settings in of_kinds])
    early = [after - before for before, after in zip(layers[0][0], layers[1][0], strict=True)]
    assert early == pytest.approx([0.1 * setting.drafts * setting.trained for setting in of_kinds[0]])
    # One or two drafts, and the token before them.
    assert layers[0][1] == [0] * 3 and layers[1][1] == pytest.approx([0.4, 0.6, 0.4])


def test_cp_by_hand(folder: Factory) -> None:
    planned = plan(folder(cp_config(), cp_parts(0.5)))
    whole = next(p.decoding for p in planned.predicted if p.decoding.options["num_speculative_tokens"] == 2)
    # One more read of the LM head: 2 + 10 + 2 of 12.
    assert whole.speedup(1) == pytest.approx(1.75 * 12 / 14)
    short = next(p.decoding for p in planned.predicted if p.decoding.options.get("draft_vocab_size") == 16)
    assert short.speedup(1) == pytest.approx(1.4 * 12 / 12.5)
    assert short.compute == pytest.approx((2 + 0.25 * 2 / 6) / 1.4)


def test_group_by_theorem_4_1(early: str) -> None:
    groups = {
        (p.decoding.options["exit_layer"], p.decoding.options["candidates"], "model" in p.decoding.options): p.decoding
        for p in plan(early, stages="2", candidates=(1, 3), new_tokens=11).predicted
    }
    assert {layer for layer, _, _ in groups} == {6, 8}  # from the middle on
    group = groups[6, 1, True]
    # (d l - (d - d_bar) (l - 1) p) / l layers and the LM head: nothing starts the first token early.
    p = 0.6 * 10 / 11
    assert group.seconds(1) == pytest.approx((10 - 4 * p + 2) * 1e-3)
    assert group.speedup(1) == pytest.approx(12 / (12 - 4 * p))
    assert group.compute == pytest.approx(1 + (1 - p) * 0.4)
    assert groups[6, 3, True].compute == pytest.approx(1 + (3 - p) * 0.4)
    # Three candidates of two requests are 6 rows, which the last stage waits for.
    assert groups[6, 3, True].seconds(2) - group.seconds(2) == pytest.approx(4 * 0.5e-3)


def test_stops_where_drafting_no_longer_gains(early: str) -> None:
    planned = plan(early)
    assert planned.best is not None and planned.stop_at is not None
    assert planned.best.decoding.speedup(planned.stop_at) > 1 >= planned.best.decoding.speedup(planned.stop_at + 1)
    assert f"--ppd-disable-by-batch-size {planned.stop_at}" in report(planned, PlanOptions(heads=(early,)))


def test_nothing_gains(folder: Factory) -> None:
    heads = folder(early_config(), early_parts(0.01))
    planned = plan(heads)
    assert planned.best is None
    assert command(planned.target, planned.best, planned.stop_at, "1") == "vllm serve the/target"
    text = report(planned, PlanOptions(heads=(heads,)))
    assert "Recommended: no drafting" in text
    assert f"Warning: the heads in {quoted(heads)} are predicted to gain nothing at every batch size (1, 2, 4" in text


def test_heads_that_gain_nothing_are_named_beside_others(folder: Factory, early: str) -> None:
    useless = folder(early_config(), early_parts(0.01))
    text = report(plan(early, useless), PlanOptions(heads=(early, useless)))
    assert text.count("Warning: ") == 1 and f"Warning: the heads in {quoted(useless)}" in text


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ({1: 1.5, 4: 1.01}, ""),
        ({1: 1.5, 4: 0.834, 16: 0.5}, "gain nothing at batch sizes (4, 16): at best 0.83 of vLLM's tokens per second"),
        ({1: 1.5, 4: 1.0}, "gain nothing at batch size (4): at best 1.00 of vLLM's"),
        ({1: 0.9, 4: 0.8}, "gain nothing at every batch size (1, 4): at best 0.90 of vLLM's"),
    ],
)
def test_batch_sizes_without_gain(speedups: dict[int, float], said: str) -> None:
    sentence = without_gain("my-heads", speedups)
    assert said in sentence and bool(said) == sentence.startswith("the heads in 'my-heads' are predicted to ")


def test_rate_gives_the_batch_size(early: str) -> None:
    """One request at a time gives 1 / 12 ms tokens a second; more than that takes a larger batch."""
    slow, fast = (plan(early, rate=rate, new_tokens=100) for rate in (0.5, 2.0))
    assert slow.predicted[0].batch == 1
    for predicted in fast.predicted:
        assert predicted.decoding.tokens_a_second(predicted.batch) >= 200
        assert predicted.batch == 1 or predicted.decoding.tokens_a_second(predicted.batch - 1) < 200
    with pytest.raises(HeadsError, match=r"cannot sustain 1e\+06 .* in batches of up to 512; lower --rate, or raise"):
        plan(early, rate=1e6)


def test_measured_times_go_on_in_a_straight_line() -> None:
    machine = measured(Timed(layer={1: 3.0, 2: 1.0, 4: 2.0}, lm_head={2: 1.0}))
    assert [machine.layer(rows) for rows in (1, 2, 3, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 3.0]
    assert [machine.lm_head(rows) for rows in (1, 2, 4)] == [1.0, 1.0, 2.0]


def test_roofline() -> None:
    machine = roofline(Weights((100, 200), (1000, 2000)), bandwidth=200, peak=1000, link=0.5)
    # 200 bytes at 200 a second; 2 * 100 FLOP a row at 1000 a second: compute-bound from 5 rows on.
    assert [machine.layer(rows) for rows in (1, 5, 10)] == [1.0, 1.0, 2.0]
    assert machine.lm_head(1) == 10.0


def test_weights_are_counted() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    d, inner, kv = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"]
    head = config.get("head_dim") or d // config["num_attention_heads"]
    attention = 2 * d * head * config["num_attention_heads"] + 2 * d * head * kv
    weights = weights_of(str(DEMO))
    assert weights.layer[0] == attention + 3 * d * inner + 2 * d
    assert weights.layer[1] == weights.layer[0] * 2  # bfloat16
    assert weights.lm_head[0] == config["vocab_size"] * d
    with pytest.raises(HeadsError, match="has no safetensors files on this disk; give --model DIR"):
        weights_of("no/such")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch 0: input should be greater than or equal to 1"),
        (["--batch", "2", "--rate", "3"], "--rate 3: --batch already describes the load; give only one of"),
        (["--hardware", "4800,990"], "--hardware 4800,990: give GB/s, TFLOP/s and microseconds, such as 4800,990,10"),
        (["--hardware", "0,990,1"], "--hardware 0,990,1: bandwidth and TFLOP/s must be above 0"),
        (["--hardware", "4800,990,1"], "target 'the/target' has no safetensors files on this disk"),
        (["--hardware", "4800,990,1", "--timings", "x"], "--timings x: --hardware already describes the machine; give"),
        (["--timings", "nowhere.json"], "'nowhere.json' has neither results of `ppd bench decode`"),
    ],
)
def test_bad_options_are_one_line(
    early: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", early, *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_refuses_what_cannot_be_planned(folder: Factory, early: str) -> None:
    with pytest.raises(HeadsError, match="no finished calibration; run `ppd calibrate"):
        plan(folder(early_config(), early_parts(0.5), finished=False))
    with pytest.raises(HeadsError, match="has heads for 'another', but others are for 'the/target'"):
        plan(early, folder(early_config("another"), early_parts(0.5)))
    cp = folder(cp_config(token_counts=False), cp_parts(1))
    with pytest.raises(HeadsError, match="has cp heads; give early heads for a worker group"):
        plan(cp, stages="2")


def test_command_line_prints_a_table_and_how_to_serve(early: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", early, "--top", "3", "--hardware", "4800,990,10", "--model", str(DEMO)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| ppd, exit") == 3
    assert "a roofline of 4800 GB/s and 990 TFLOP/s, link 10 us" in printed
    line = printed.strip().splitlines()[-1].strip()
    assert line.startswith(f"vllm serve {DEMO} --speculative-model {early} --spec-tokens ")


def decoded(path: Path, target: str, steps: dict[int, list[float]]) -> str:
    """Results of `ppd bench decode`: mean seconds of vLLM's own steps by batch size, a turn each."""
    turns = [
        {"contender": name, "batch": size, "window_seconds": factor * 10 * mean, "steps": 10}
        for name, factor in (("vLLM", 1), ("cp", 7))
        for size, means in steps.items()
        for mean in means
    ]
    runs = [{"options": {"model": model, "temperature": 0}, "turns": turns} for model in (target, "another")]
    path.write_text(json.dumps({"benchmark": "decode", "runs": runs}))
    return str(path)


def test_steps_that_a_benchmark_timed_are_shared_out(early: str, tmp_path: Path) -> None:
    file = decoded(tmp_path / "decode.json", "the/target", {1: [9e-3, 12e-3, 13e-3], 4: [12e-3], 8: [24e-3]})
    best = plan(early, timings=file).predicted[0].decoding
    assert isinstance(best, Drafting)
    assert best.plain(1) == pytest.approx(12e-3)
    assert best.plain(6) == pytest.approx(18e-3)
    # As TIMES has it: a millisecond a layer, and an LM head worth two.
    assert best.machine.layer(1) == pytest.approx(1e-3)
    assert best.machine.lm_head(8) == pytest.approx(4e-3)
    with pytest.raises(HeadsError, match="has no results of the/target; run `ppd bench decode --model the/target`"):
        plan(early, timings=decoded(tmp_path / "other.json", "another", {1: [1e-3]}))


def measured_costs(path: Path, seconds: list[list[float]], **engine: Any) -> str:
    """The file of a server's steps with CP heads, without drafts and with up to two, in batches of 1 and 4."""
    server = {"target": "the/target", "method": "cp", "heads": str(path / "cp-0"), "num_speculative_tokens": 2}
    server |= {"exit_layer": None, "draft_vocab_size": None}
    counts = [0, 1, 2] if len(seconds[0]) == 3 else [0, 2]
    table = CostTable(sizes=[1, 4][: len(seconds)], counts=counts, seconds=seconds)
    stored = MeasuredCosts(method=table).model_dump() | {"engine": server | engine}  # of a damaged file, too
    (path / "costs.json").write_text(json.dumps(stored))
    return str(path / "costs.json")


def test_an_h200_whose_host_was_too_slow_is_told_not_to_draft(folder: Factory, tmp_path: Path) -> None:
    """4B target, batch 1: 3.0 ms a step with vLLM alone, 4.8 ms with CP heads and 1.54 tokens of it."""
    heads = folder(cp_config(), cp_parts(0.36))
    assert plan(heads).best is not None  # by layers and LM head alone
    options = PlanOptions(heads=(heads,), timings=measured_costs(tmp_path, [[3.0e-3, 4.8e-3]]))
    planned = make_plan(options)
    assert [under.decoding.length for under in planned.predicted] == pytest.approx([1.54, 1.36])
    # A single draft has as many launches as two.
    assert [under.speedup for under in planned.predicted] == pytest.approx([1.54 * 3.0 / 4.8, 1.36 * 3.0 / 4.8])
    text = report(planned, options)
    assert "no drafting, as no setting of these heads gains" in text
    assert "a server's step costs, host time included" in text
    assert "host's work" not in text


def test_steps_that_a_server_measured_give_the_gain(folder: Factory, tmp_path: Path) -> None:
    heads = folder(cp_config(), cp_parts(0.5))
    seconds = [[3e-3, 3.2e-3, 3.4e-3], [4e-3, 5e-3, 6e-3]]
    planned = plan(heads, timings=measured_costs(tmp_path, seconds, runner="v2"))  # an earlier release's
    assert planned.best is not None
    two, one = planned.best.decoding, planned.predicted[1].decoding
    assert two.speedup(1) == pytest.approx(1.75 * 3.0 / 3.4)
    assert one.speedup(1) == pytest.approx(1.5 * 3.0 / 3.2)
    assert two.speedup(2) == pytest.approx(1.75 * (3 + 1 / 3) / (3.4 + 2.6 / 3))
    assert two.speedup(7) == pytest.approx(1.75 * 5.0 / 8.6)  # on in a straight line
    assert planned.stop_at == 7


@pytest.mark.parametrize(
    ("engine", "lacks"),
    [
        ({}, "draft_vocab_size 16"),
        ({"num_speculative_tokens": 1}, "num_speculative_tokens 2, draft_vocab_size 16"),
        ({"draft_vocab_size": 16}, "draft_vocab_size unset"),
    ],
)
def test_settings_that_a_server_did_not_measure_are_named(
    folder: Factory, tmp_path: Path, engine: dict[str, Any], lacks: str
) -> None:
    heads = folder(cp_config(), cp_parts(0.5))
    planned = plan(heads, timings=measured_costs(tmp_path, [[3e-3, 4e-3]], **engine))
    assert planned.lacks == {heads: f"not in --timings: {lacks}; start a server with it once"}
    assert {under.decoding.options.get("draft_vocab_size") for under in planned.predicted} == {
        engine.get("draft_vocab_size")
    }


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"method": "dynamo"}, "has no steps of these settings: method cp; start a server with one of them once"),
        ({"heads": "other"}, r"these settings: these heads \(it has 'other'\)"),
        ({"target": "another"}, "has steps of 'another', not of 'the/target'; start a server of that target once"),
        ({"method": None}, r"damaged or of an older version \(engine.method\); start the server once with"),
    ],
)
def test_steps_of_another_server_are_refused(
    folder: Factory, tmp_path: Path, engine: dict[str, Any], message: str
) -> None:
    heads = folder(cp_config(), cp_parts(0.5))
    with pytest.raises(HeadsError, match=message):
        plan(heads, timings=measured_costs(tmp_path, [[3e-3, 4e-3]], **engine))


def test_early_steps_are_of_a_single_exit(early: str, tmp_path: Path) -> None:
    exit_at = {"method": "ppd", "heads": early, "num_speculative_tokens": 2}
    planned = plan(early, timings=measured_costs(tmp_path, [[3e-3, 4e-3]], exit_layer=[6], **exit_at))
    assert {under.decoding.options["exit_layer"] for under in planned.predicted} == {6}
    assert planned.lacks.keys() == {early, "none"} and "no heads" in planned.lacks["none"]
    with pytest.raises(HeadsError, match="has no steps of these settings"):
        plan(early, timings=measured_costs(tmp_path, [[3e-3, 4e-3]], exit_layer=[2, 6], **exit_at))
    with pytest.raises(HeadsError, match="a server's steps have one stage"):
        plan(early, stages="2", timings=measured_costs(tmp_path, [[3e-3, 4e-3]], exit_layer=[6], **exit_at))
