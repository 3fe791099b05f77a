# SPDX-License-Identifier: Apache-2.0
"""`ppd calibrate`: expected acceptance against simulation, match rates against a slow count, and a run that resumes."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from conftest import Factory, patterned_texts, write_texts

from vllm_ppd.heads import draft_vocabulary
from vllm_ppd.heads.base import LARGEST_BATCH
from vllm_ppd.heads.calibration.options import CalibrationOptions
from vllm_ppd.heads.calibration.replay import replay
from vllm_ppd.heads.calibration.report import report
from vllm_ppd.heads.calibration.run import calibrate, counts_of, open_calibration
from vllm_ppd.heads.calibration.session import Calibration
from vllm_ppd.heads.cp import calibration as cp_calibration
from vllm_ppd.heads.early import calibration as early_calibration
from vllm_ppd.heads.early.calibration import match_exits
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.io import load_config
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.planning.options import PlanOptions
from vllm_ppd.heads.planning.plan import all_settings
from vllm_ppd.heads.planning.recommend import recommend
from vllm_ppd.heads.training import loop
from vllm_ppd.vllm_plugins.cli.main import main


def simulate(accept: list[list[float]], length: int, limits: list[int], rng: random.Random) -> tuple[int, ...]:
    """One engine's way along one text, drawing whether each draft is accepted."""
    t = cycles = drafts = drafted = accepted = 0
    while t < length:
        room = max(0, min(length - t - 2, limits[t] if t < len(limits) else 0))
        taken = 0
        while taken < room and rng.random() < accept[t][taken]:
            taken += 1
        cycles, drafts = cycles + (t < length - 1), drafts + (room > 0)
        drafted, accepted = drafted + room, accepted + taken
        t += taken + 1
    return cycles, drafts, drafted, accepted


@pytest.mark.parametrize("limited", [False, True])
def test_walk_is_what_an_engine_would_do(limited: bool) -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    accept, lengths = torch.rand(2, 7, 3), torch.tensor([8, 5])
    limit = torch.randint(0, 4, (2, 7)) if limited else None
    measured = replay(accept, lengths, limit)
    limits = limit.tolist() if limit is not None else [[3] * 7] * 2
    totals = torch.zeros(4)
    rounds = 20_000
    for _ in range(rounds):
        for text in range(2):
            totals += torch.tensor(simulate(accept[text].tolist(), int(lengths[text]), limits[text], rng))
    torch.testing.assert_close(torch.tensor(measured), totals / rounds, rtol=0.02, atol=0.02)


def test_walk_counts_whole_numbers_for_greedy_texts() -> None:
    rng = random.Random(1)
    accept = (torch.rand(1, 40, 4) < 0.6).float()
    assert tuple(replay(accept, torch.tensor([41]))) == simulate(accept[0].tolist(), 41, [4] * 40, rng)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "data.jsonl", patterned_texts(30, 30))


@pytest.fixture(scope="module")
def heads(tiny_model: Factory, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Factory:
    """heads(kind, **options): trained for a few steps on the tiny llama, made once."""
    made: dict[str, Path] = {}

    def get(kind: str, **options: Any) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind) / "heads"
            given: dict[str, Any] = {
                "model": str(tiny_model()), "data": (str(data),), "out": str(made[kind]), "steps": 8, "batch_size": 4,
                "sequence_length": 64, "precision": "float32", "stored_dtype": "float32", "device": "cpu",
                "held_out": 0.1, **options,
            }  # fmt: skip
            loop.train(KINDS[kind].options(**given))
        return made[kind]

    return get


def options(folder: Path, data: Path, **changes: Any) -> CalibrationOptions:
    given: dict[str, Any] = {
        "heads": str(folder), "data": (str(data),), "prompts": 6, "prompt_tokens": 16, "new_tokens": 20, "drafts": 3,
        "batch_sizes": (1, 2), "device": "cpu", "batch": 4,
    }  # fmt: skip
    return CalibrationOptions(**{**given, **changes})


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_exit_matches_against_a_slow_count(heads: Factory, data: Path, kind: str) -> None:
    calibration = open_calibration(options(heads("early"), data))
    target, texts = calibration.target, getattr(calibration, kind)
    early = early_calibration._early_heads(calibration)
    measured = match_exits(target, early, texts, (1, 3), 4, calibration.autocast)
    hits, accept = torch.zeros_like(measured.hits), torch.zeros_like(measured.accept)
    temperature = texts.temperature or 1.0
    with torch.no_grad():
        for row, ids in enumerate(texts.ids):
            states = target.model(ids[None], output_hidden_states=True)
            for j in range(int(texts.lengths[row])):
                at = texts.prompt + j - 1
                token = int(ids[at + 1])
                p = torch.softmax(states.logits[0, at] / temperature, -1)
                for index, layer in enumerate(early.exit_layers):
                    hidden = target.norm(states.hidden_states[layer][0, at])
                    for form, read in enumerate((hidden, early(hidden, layer))):
                        logits = target.model.lm_head(read)
                        order = logits.argsort(descending=True).tolist()
                        for place, k in enumerate((1, 3)):
                            hits[form, index, place, row, j] = token in order[:k]
                        q = torch.softmax(logits / temperature, -1)
                        sure = float(order[0] == token)
                        accept[form, index, row, j] = (
                            min(1.0, float(q[token] / p[token])) if texts.temperature else sure
                        )
    torch.testing.assert_close(measured.accept, accept, atol=1e-3, rtol=1e-3)
    assert torch.equal(measured.hits, hits)


EXTRA: dict[str, dict[str, Any]] = {
    "early": {},
    "cp": {"rank": 2, "positions": 4},
    "dynamo": {"tokens": 3, "mask_entries": 200},
}


@pytest.mark.parametrize("kind", EXTRA)
def test_report_and_recommendation(heads: Factory, data: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_vocabulary, "LEAST", 128)
    folder = heads(kind, **EXTRA[kind])
    result = calibrate(options(folder, data))
    chosen = result["recommendation"]
    config = load_config(folder)
    assert config.num_speculative_tokens == chosen["num_speculative_tokens"]
    if kind == "early":
        assert config.default_exit_layers == chosen["default_exit_layers"]  # type: ignore[attr-defined]
    else:
        sizes = result["parts"]["vocabulary"]
        assert list(sizes) == ["192", "128"]
        assert 0 < sizes["128"]["covers"] <= sizes["192"]["covers"] <= 1
        assert config.draft_vocab_size == chosen["draft_vocab_size"]
    assert config.calibration is not None and config.calibration.device == "cpu"
    ranges = config.calibration.num_speculative_tokens_per_batch_size
    assert ranges == chosen["calibration"]["num_speculative_tokens_per_batch_size"]
    assert ranges[-1][1] == LARGEST_BATCH and all(0 <= drafts <= config.num_speculative_tokens for *_, drafts in ranges)
    text = report(json.loads((folder / "calibration.json").read_text()))
    assert "Recommended" in text
    assert "| layer" in text
    assert ("Draft vocabularies" in text) == (kind != "early")
    assert ("alpha_c" in text) == (kind == "dynamo")
    if kind == "dynamo":
        # Every power of the mask is measured, and one of them is recommended.
        parts, (sampled,) = result["parts"], (x for n, x in result["parts"]["acceptance"].items() if n != "greedy")
        assert set(parts["mask"]) == {"0", "0.5"}
        assert parts["mask"]["0"]["rows"] != sampled["rows"]
        settings = list(config.settings(config.parts.model_validate(parts), greedy=False))
        assert {setting.options["sampling"]["alpha_c"] for setting in settings} == {0.0, 0.5, 1.0}
        # A server follows the heads, so that no other power can be planned for.
        served = [x for x in settings if x.options["sampling"]["alpha_c"] == config.sampling.alpha_c]
        assert len(all_settings(PlanOptions(heads=(str(folder),)))[1]) == len(served) > 0
        parts["mask"]["0.5"]["rows"][0] |= {"cycles": 1, "drafted": 2, "accepted": 2}  # as if it were far the best
        assert recommend(config, config.parts.model_validate(parts))["sampling"]["alpha_c"] == 0.5


@pytest.mark.parametrize("kind", ["cp", "dynamo"])
def test_documents_shorter_than_a_window(heads: Factory, tmp_path: Path, kind: str) -> None:
    """Also where most of them have no room for a prompt; a window is as long as the longest one."""
    folder, texts = heads(kind, **EXTRA[kind]), patterned_texts(1, 8)
    short = write_texts(tmp_path / "short.jsonl", [text[:8] for text in patterned_texts(60, 30)] + texts)
    asked = options(folder, short, prompts=2, recommend=False)
    calibration = open_calibration(asked)
    ids = calibration.target.tokenizer(texts[0], add_special_tokens=False)["input_ids"]
    assert [batch.input_ids.tolist() for batch in calibration.windows] == [[ids]]
    measured = calibrate(asked)["parts"]["likelihood"]
    assert measured["ppl_n"][0] > 1
    nothing = write_texts(tmp_path / "nothing.jsonl", [text[:8] for text in patterned_texts(60, 30)])
    with pytest.raises(TrainingError, match="the longest document of the data has "):
        _ = open_calibration(options(folder, nothing)).windows


def test_stopped_calibration_goes_on(heads: Factory, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = heads("cp", **EXTRA["cp"])
    asked = options(folder, data, recommend=False, seed=5)
    seen: list[str] = []

    def spy(name: str, part: Any, fail: bool = False) -> Any:
        def call(calibration: Calibration) -> Any:
            seen.append(name)
            if fail:
                raise KeyboardInterrupt
            return part(calibration)

        return call

    real = cp_calibration.PARTS
    last = list(real)[-1]
    monkeypatch.setattr(cp_calibration, "PARTS", {name: spy(name, part, name == last) for name, part in real.items()})
    with pytest.raises(KeyboardInterrupt):
        calibrate(asked)
    monkeypatch.setattr(cp_calibration, "PARTS", {name: spy(name, part) for name, part in real.items()})
    calibrate(asked)
    assert seen == [*real, last]
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--prompts", "100000"), "but 100000 are needed"),
        (("--model", "/nowhere"), "cannot load model '/nowhere'"),
        (("--temperature", "0"), "--temperature 0: input should be greater than 0"),
        (("--batch-sizes", "4,0"), "--batch-sizes 0: input should be greater than or equal to 1"),
        (("--batch-sizes", ","), "--batch-sizes (): tuple should have at least 1 item"),
        (("--eps", "0.5,2"), "--eps 2: input should be less than or equal to 1"),
        (("--new-tokens", "512"), "--new-tokens 512 leave no prompt of the model's 512 tokens"),
    ],
)
def test_bad_input(heads: Factory, data: Path, capsys: Any, more: tuple[str, ...], message: str) -> None:
    folder = heads("early")
    before = (folder / "model.safetensors").read_bytes()
    assert main(["calibrate", str(folder), "--data", str(data), "--device", "cpu", *more]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert (folder / "model.safetensors").read_bytes() == before


def test_heads_of_another_target(heads: Factory, tiny_model: Factory, data: Path) -> None:
    from vllm_ppd.heads.errors import HeadsError

    with pytest.raises(HeadsError, match="hidden_size is 64 there, but 128"):
        open_calibration(options(heads("early"), data, model=str(tiny_model("qwen2"))))


def test_counts_are_of_what_the_model_writes(tmp_path: Path) -> None:
    target: Any = SimpleNamespace(tokenizer=tiny.make_tokenizer(), vocab_size=tiny.VOCAB)
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt_token_ids": [40, 41], "token_ids": [66, 67, 66]}\n{"prompt_token_ids": [40]}\n')
    written = counts_of([str(path)], target, by_answer=True)
    assert {i: int(written[i]) for i in written.nonzero().flatten().tolist()} == {66: 2, 67: 1}
    assert int(counts_of([str(path)], target, by_answer=False)[40]) == 2
