# SPDX-License-Identifier: Apache-2.0
"""`ppd calibrate`: expected acceptance against simulations and slow counts, and what
reaches the heads.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEMO, Factory, patterned_texts, write_texts
from heads_folders import OF_DEMO
from records import write
from transformers import GenerationConfig

from vllm_ppd.heads.calibration.acceptance import (
    acceptance,
    generate,
    replay,
    take_prompts,
)
from vllm_ppd.heads.calibration.run import (
    Calibration,
    calibrate,
    counts_of,
    open_calibration,
    report,
    save_recommended,
)
from vllm_ppd.heads.early.calibration import read_exits
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.folder import load_calibration, load_config
from vllm_ppd.heads.options import CalibrationOptions
from vllm_ppd.heads.planning import recommend
from vllm_ppd.heads.provenance import data_files
from vllm_ppd.heads.training.target import Target
from vllm_ppd.vllm_plugins.cli.main import main


def simulate(
    accept: list[list[float]], length: int, limits: list[int], rng: random.Random
) -> tuple[int, ...]:
    """One engine's way along one text, drawing whether each draft is accepted."""
    t = cycles = drafts = drafted = accepted = 0
    while t < length:
        room = max(0, min(length - t - 2, limits[t] if t < len(limits) else 0))
        taken = 0
        while taken < room and rng.random() < accept[t][taken]:
            taken += 1
        cycles += t < length - 1
        drafts += room > 0
        drafted += room
        accepted += taken
        t += taken + 1
    return cycles, drafts, drafted, accepted


def test_replay_is_what_an_engine_would_do() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    accept = torch.rand(2, 7, 3)
    lengths = torch.tensor([8, 5])
    limit = torch.randint(0, 4, (2, 7))
    rounds = 20_000
    totals = torch.zeros(4)
    for text in range(2):
        chances = accept[text].tolist()
        limits = limit[text].tolist()
        for _ in range(rounds):
            way = simulate(
                chances,
                int(lengths[text]),
                limits,
                rng,
            )
            totals += torch.tensor(way)
    counts = replay(accept, lengths, limit)
    measured = torch.tensor([*counts.model_dump().values()][:4])
    torch.testing.assert_close(
        measured,
        totals / rounds,
        rtol=0.02,
        atol=0.02,
    )


def test_acceptance_under_shared_noise_by_simulation() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p, log_q = (
        torch.randn(
            2,
            1,
            6,
            generator=generator,
        )
        .mul(2)
        .log_softmax(-1)
    )
    log_q[0, 4] = -torch.inf  # outside a draft vocabulary
    noise = -torch.empty(400_000, 6).exponential_(generator=generator).log()
    target = (log_p + noise).argmax(-1)
    draft = (log_q + noise).argmax(-1)
    for token in range(6):
        ids = torch.tensor([token])
        drawn = target == token
        seen = float((draft[drawn] == token).float().mean())
        expected = float(acceptance(log_p, log_q, ids, 1.0))
        assert expected == pytest.approx(seen, abs=0.02)
        greedy = float(acceptance(log_p, log_q, ids, 0.0))
        assert greedy == float(token == int(log_q.argmax()))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write_texts(folder / "data.jsonl", patterned_texts(30, 30))


HEADS = DEMO.parent / "heads"


def options(folder: Path, data: Path) -> CalibrationOptions:
    return CalibrationOptions(
        heads=str(folder),
        model=str(DEMO),
        data=(str(data),),
        num_prompts=3,
        prompt_tokens=16,
        output_len=12,
        num_speculative_tokens=2,
        device="cpu",
        batch_size=2,
    )


def test_exits_against_a_slow_count(data: Path) -> None:
    calibration = open_calibration(options(HEADS / "early", data))
    target = calibration.target
    texts = calibration.greedy
    early = EarlyHeads(calibration.config, calibration.tensors).float()
    measured = read_exits(calibration, texts)
    ranks = torch.zeros_like(measured.ranks)
    for row, ids in enumerate(texts.ids):
        states = target.model(ids[None], output_hidden_states=True).hidden_states
        for j, token in enumerate(texts.generated[row].tolist()):
            for index, layer in enumerate(early.exit_layers):
                hidden = target.norm(states[layer][0, texts.prompt + j - 1])
                logits = target.model.lm_head(early(hidden, layer))
                ranks[index, row, j] = int((logits > logits[token]).sum())
    assert torch.equal(measured.ranks, ranks)
    assert torch.equal(measured.accept, (ranks == 0).float())


@pytest.mark.parametrize("kind", OF_DEMO)
def test_what_is_measured_reaches_the_heads(
    data: Path, kind: str, tmp_path: Path, capsys: Any
) -> None:
    folder = Path(shutil.copytree(HEADS / kind, tmp_path / "heads"))
    provenance = folder / "provenance.json"
    facts = json.loads(provenance.read_text())
    facts["data_files"] = data_files([data])
    provenance.write_text(json.dumps(facts))
    if kind != "early":
        save_recommended(
            str(folder), load_config(folder), {"draft_vocab_size": 128}
        )
    result = calibrate(options(folder, data))
    assert "these heads were trained on data" in capsys.readouterr().err
    chosen = result["recommendation"]
    config = load_config(folder)
    assert config.num_speculative_tokens == chosen["num_speculative_tokens"]
    if kind == "early":
        assert config.recommended["exit_layer"] == chosen["default_exit_layers"]
    else:
        assert set(result["parts"]["vocabulary"]) == {"128"}
        assert config.draft_vocab_size == chosen["draft_vocab_size"]
        # The whole one does not exclude a part of it for good.
        save_recommended(str(folder), config, {"draft_vocab_size": None})
        calibration = open_calibration(options(folder, data))
        calibration.tensors[str(config.counts_tensor)][1000:] = 0
        assert calibration.draft_vocabulary() is not None
    if kind == "cp":
        assert len(result["parts"]["acceptance"]["greedy"]["by_drafts"]) == 2
    assert recommend(config, load_calibration(folder)) == chosen
    text = report(
        json.loads((folder / "calibration.json").read_text()), str(folder)
    )
    assert "redicted" in text and "| ---" in text
    assert text.splitlines()[2] in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    "path", sorted(DEMO.parents[1].rglob("heads/*/calibration.json")), ids=str
)
def test_stored_calibrations_are_read(path: Path) -> None:
    """Also those of earlier versions, which measured more."""
    chosen = recommend(load_config(path.parent), load_calibration(path.parent))
    assert chosen["predicted_speedup"] > 0
    assert "| ---" in report(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def target(tiny_model: Factory) -> Target:
    return Target(str(tiny_model()), torch.device("cpu"), torch.float32)


def test_a_pass_reads_the_experts_of_a_token(
    tiny_model: Factory, target: Target
) -> None:
    """Two of four experts, beside attention and what routes."""
    sparse = Target(str(tiny_model("gpt_oss")), target.device, target.dtype)
    nothing: Any = {}  # is read of the heads
    calibration = Calibration(nothing, nothing, nothing, sparse)
    sparse.config.num_experts_per_tok = 2
    half = calibration.timing().lm_head_share
    sparse.config.num_experts_per_tok = 4
    assert half / 2 < calibration.timing().lm_head_share < half


PROMPTS = [[40 + i] * 3 + list(range(60, 60 + i)) for i in (4, 9, 1, 6)]


@torch.no_grad()
def test_greedy_texts_are_the_targets_argmax(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever generation_config.json says, and beside longer prompts; each of its end
    tokens ends a text.
    """
    given = GenerationConfig(
        eos_token_id=[0, 9],
        repetition_penalty=1.5,
        suppress_tokens=list(range(1, 160)),
        do_sample=True,
        temperature=3.0,
        top_k=5,
    )
    monkeypatch.setattr(target.model, "generation_config", given)
    texts = generate(target, PROMPTS, 10)
    for row, prompt in enumerate(PROMPTS):
        written: list[int] = []
        while len(written) < 10 and not {0, 9} & set(written):
            logits = target.model(torch.tensor([prompt + written])).logits
            written.append(int(logits[0, -1].argmax()))
        assert texts.generated[row, : texts.lengths[row]].tolist() == written
    # A trained base model is saved with it.
    assert target.model.generation_config is given


def test_prompts_are_the_records_own_or_pieces_of_texts(
    tmp_path: Path, target: Target
) -> None:
    records = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    ids = write(tmp_path / "a.jsonl", *records)
    fitting = [PROMPTS[0], PROMPTS[2], PROMPTS[3]]
    assert (
        take_prompts(
            [ids],
            target,
            3,
            8,
            longest=10,
        )
        == fitting
    )
    with pytest.raises(TrainingError, match=r"has 3 prompts .* but 4 are needed"):
        take_prompts(
            [ids],
            target,
            4,
            8,
            longest=10,
        )
    text = write(tmp_path / "b.jsonl", {"text": "abcdefghijklmnopqrst"})
    prompts = take_prompts(
        [text],
        target,
        2,
        8,
        longest=99,
    )
    assert target.tokenizer.batch_decode(prompts) == ["ijklmnop", "abcdefgh"]
    foreign = write(tmp_path / "c.jsonl", {"prompt_token_ids": [9999]})
    with pytest.raises(
        TrainingError, match="has token id 9999, but the model has 320"
    ):
        take_prompts(
            [foreign],
            target,
            1,
            8,
            longest=99,
        )


def test_counts_are_of_what_the_model_writes(
    tmp_path: Path, target: Target
) -> None:
    answered = {"prompt_token_ids": [40, 41], "token_ids": [66, 67, 66]}
    asked = {"prompt_token_ids": [40]}
    path = write(tmp_path / "data.jsonl", answered, asked)
    written = counts_of([path], target)
    assert (int(written[66]), int(written[67]), int(written.sum())) == (2, 1, 3)
    prompts = counts_of([write(tmp_path / "prompts.jsonl", asked)], target)
    assert int(prompts[40]) == int(prompts.sum()) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--num-prompts", "100000"), "100000 are needed"),
        (("--model", "/nowhere"), "cannot load model '/nowhere'"),
        (
            ("--output-len", "1024"),
            "--output-len 1024 leaves no prompt of the model's 1024 tokens",
        ),
    ],
)
def test_bad_input(
    data: Path,
    capsys: Any,
    more: tuple[str, ...],
    message: str,
) -> None:
    words = ["calibrate", str(HEADS / "early"), "--data", str(data), *more]
    assert main([*words, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
