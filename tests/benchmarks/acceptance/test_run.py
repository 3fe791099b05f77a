# SPDX-License-Identifier: Apache-2.0
"""`ppd bench acceptance`: what is compared, what is kept, and where a stopped run goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Factory, cells_of
from heads_folders import make_heads
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.benchmarks.acceptance import run as acceptance
from vllm_ppd.benchmarks.acceptance.options import AcceptanceOptions
from vllm_ppd.benchmarks.acceptance.run import by_category, by_position, costs, fixed, headline, report, run
from vllm_ppd.benchmarks.harness.contenders import BASE, Contender
from vllm_ppd.benchmarks.harness.results import stored
from vllm_ppd.benchmarks.harness.session import Stopped

TOKENS = 9


class Engine:
    """In an engine's place: one draft of two is accepted in each of four steps, and ngram's text differs once."""

    turns = 0
    stop_after = 99

    def __init__(self, contender: Contender, arguments: dict[str, Any], log: Path) -> None:
        self.name = contender.name
        if contender.name == "broken":
            raise BenchError("broken: does not start")

    def ready(self) -> None:
        pass

    def call(self, _: str, prompts: list[list[int]], tokens: int, *sampling: float) -> dict[str, Any]:
        if Engine.turns >= Engine.stop_after:
            raise KeyboardInterrupt
        Engine.turns += 1
        ids = [[ids[0] + i for i in range(tokens)] for ids in prompts]
        if self.name == "ngram" and prompts[0][0] == 3:
            ids[0] = [*ids[0][:-1], 0]
        many = 0 if self.name == BASE else 4 * len(prompts)
        return {
            "drafts": many, "draft_tokens": 2 * many, "accepted_tokens": many, "accepted_lengths": [0, many],
            "token_ids": ids, "steps": 5,
        }  # fmt: skip

    def close(self) -> None:
        pass


@pytest.fixture
def options(tiny_model: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AcceptanceOptions]:
    monkeypatch.setattr(acceptance, "EngineProcess", Engine)
    Engine.turns, Engine.stop_after = 0, 99
    data = tmp_path / "ids.jsonl"
    data.write_text("".join(json.dumps({"prompt_token_ids": [n] * n}) + "\n" for n in range(1, 6)))
    small = {
        "model": str(tiny_model()), "data": (f"ids={data}",), "plain": ("ngram",), "batch_sizes": (2,),
        "new_tokens": TOKENS, "out": str(tmp_path / "acceptance.json"), "also": ('broken={"method": "ngram"}',),
    }  # fmt: skip
    return lambda **changes: AcceptanceOptions(**{**small, **changes})


def test_tables_tell_what_is_accepted_and_equal(options: Callable[..., AcceptanceOptions]) -> None:
    text = run(options())
    greedy, sampled = (cells_of(section) for section in text.split("left out: broken")[:2])
    assert greedy[1][:5] == ["vLLM", "5", "5 of 5", "0.000 (0.000 to 0.000)", "0.000"]
    # Eight tokens after the first one, four of them drafts: four steps, in each of which one of two was accepted.
    assert greedy[2][:7] == ["ngram", "5", "4 of 5", "1.000 (1.000 to 1.000)", "2.000", "0.500", "2.000"]
    assert "same as vLLM" in greedy[0] and "same as vLLM" not in sampled[0]
    assert "broken: does not start" in text
    runs = stored(Path(options().out))
    assert report(runs) == text
    header, *rows = cells_of(headline(runs))
    assert header[1:] == ["accepted, greedy", "accepted, T 0.8", "cost, passes"]
    assert rows == [["ngram", "1.00 (1.00 to 1.00)", "1.00 (1.00 to 1.00)", "0.00"]]
    assert greedy[1][-1] == "-" and greedy[2][-1] == "0.000"
    assert by_position(runs[0])["ngram"] == {1: (1.0, 1.0, 1.0)}
    for measured in [*runs[-1].earlier, runs[-1].run]:
        measured["turns"] = [turn for turn in measured["turns"] if turn["contender"] != "ngram"]
    assert cells_of(headline(runs))[1] == ["ngram", "1.00 (1.00 to 1.00)", "-", "0.00"]


def test_shares_by_position_count_steps_without_drafts(options: Callable[..., AcceptanceOptions]) -> None:
    run(options())
    measured = stored(Path(options().out))[0]
    for turn in measured.run["turns"]:
        turn["steps"] *= 2
    assert by_position(measured)["ngram"] == {1: (0.5, 0.5, 0.5)}


def test_categories_are_decoded_apart(options: Callable[..., AcceptanceOptions], tmp_path: Path) -> None:
    data = tmp_path / "ids.jsonl"
    records = [{"prompt_token_ids": [n] * n, "category": "odd" if n % 2 else "even"} for n in range(1, 6)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = run(options(temperatures=(0.0,)))
    (measured,) = stored(Path(options().out))
    assert [turn["category"] for turn in measured.run["turns"]] == ["even", "odd", "odd"] * 2
    assert cells_of(by_category(measured)) == [["accepted per step", "even", "odd"], ["ngram", "1.00", "1.00"]]
    assert by_category(measured) in text


def test_stopped_run_goes_on(options: Callable[..., AcceptanceOptions]) -> None:
    Engine.stop_after = 8  # all six of vLLM alone, two of ngram
    with pytest.raises(Stopped, match=r"kept in .*acceptance\.json; the same command continues"):
        run(options())
    Engine.stop_after = 99
    text = run(options())
    assert Engine.turns == 12 and "4 of 5" in text
    run(options())
    assert Engine.turns == 12


def test_drafts_are_made_in_every_step() -> None:
    asked = {"model": "heads", "num_speculative_tokens": 2}
    assert fixed(Contender("ours", asked), 3).speculative_config == {**asked, "adaptive": False}
    theirs = Contender("ngram", {"method": "ngram", "num_speculative_tokens": 3})
    assert fixed(theirs, 3) is theirs


def passes(model: Path, numbers: float, layers: int, lm_heads: float) -> Any:
    """Numbers of heads, layers of the target and reads of its LM head, in passes."""
    tensors = load_file(model / "model.safetensors")
    layer = sum(tensor.numel() for name, tensor in tensors.items() if "layers.0." in name)
    lm_head = tensors["lm_head.weight"].numel()
    whole = AutoConfig.from_pretrained(model).num_hidden_layers * layer + lm_head
    return pytest.approx((numbers + layers * layer + lm_heads * lm_head) / whole, abs=1e-4)


@pytest.mark.parametrize(
    ("condition", "matrices", "reads"), [("none", 3, 1), ("token", 3 + 1, 1), ("chain", 3 + 1 + 1, 2)]
)
def test_cp_reads_its_matrices_and_the_lm_head_once_or_once_a_draft(
    tiny_model: Factory, tmp_path: Path, condition: str, matrices: int, reads: int
) -> None:
    """For two drafts all matrices of the checkpoint, for a single draft those of fewer positions."""
    model = tiny_model()
    heads = make_heads(tmp_path / "heads", "cp", model, rank=3, condition=condition)
    config = {"model": str(heads), "num_speculative_tokens": 2, "draft_vocab_size": 100}
    tensors = load_file(heads / "model.safetensors")
    saved = sum(t.numel() for name, t in tensors.items() if name.startswith("cp.") and "gate" not in name)
    share = 100 / AutoConfig.from_pretrained(model).vocab_size
    everyone = [Contender("vLLM"), Contender("2", config), Contender("1", config | {"num_speculative_tokens": 1})]
    assert costs(everyone, str(model)) == {
        "2": passes(model, saved, 0, share * reads), "1": passes(model, saved - matrices * 64**2, 0, share)
    }  # fmt: skip


def test_costs_are_counted_where_weights_are_known(tiny_model: Factory, tmp_path: Path) -> None:
    """Layers of heads and of peers; none of vLLM's other methods and of drafts of several exits."""
    model, drafts = tiny_model(), {"num_speculative_tokens": 2}
    early, dynamo = ({"model": str(make_heads(tmp_path / kind, kind, model))} for kind in ("early", "dynamo"))
    peer = tmp_path / "peer"
    peer.mkdir()
    save_file(
        {"fc": torch.zeros(7, 11), "lm_head": torch.zeros(AutoConfig.from_pretrained(model).vocab_size, 3)},
        peer / "model.safetensors",
    )
    configs: dict[str, dict[str, Any]] = {
        "early": early, "exit 2": early | {"method": "ppd", "exit_layer": 2}, "dynamo": dynamo,
        "eagle": {"method": "eagle", "model": str(peer)},
        "ngram": {"method": "ngram"}, "suffix": {"method": "suffix"}, "no heads": {"method": "ppd"},
        "eagle3": {"method": "eagle3", "model": str(peer)}, "exits": early | {"exit_layer": [2, 4]},
        "draft model": {"method": "draft_model", "model": str(model)},
    }  # fmt: skip
    assert costs([Contender(name, config | drafts) for name, config in configs.items()], str(model)) == {
        "early": passes(model, 2 * 64**2, 2 * 4, 2), "exit 2": passes(model, 2 * 64**2, 2 * 2, 2),
        "dynamo": passes(model, 0, 2, 1), "eagle": passes(model, 2 * 77, 0, 2),
        "ngram": 0.0,
    }  # fmt: skip
    assert costs([Contender("ngram", {"method": "ngram"})], str(tiny_model("mixtral"))) == {}


@pytest.mark.full
def test_greedy_text_of_engines_is_vllms(tiny_model: Factory, heads_folder: Factory, tmp_path: Path) -> None:
    data = tmp_path / "ids.jsonl"
    data.write_text("".join(json.dumps({"prompt_token_ids": [3 + n, 40, 3] * 4}) + "\n" for n in range(6)))
    text = run(
        AcceptanceOptions(
            model=str(tiny_model()), data=(str(data),), heads=(str(heads_folder((2, 4))),), plain=("ngram",),
            batch_sizes=(4,), new_tokens=24, kv_cache_gib=0.05, out=str(tmp_path / "a.json"), temperatures=(0.0,),
        )
    )  # fmt: skip
    header, *rows = cells_of(text)
    same = [row[header.index("same as vLLM")] for row in rows if len(row) == len(header)]
    assert len(same) >= 3 and set(same) == {"6 of 6"}, text
