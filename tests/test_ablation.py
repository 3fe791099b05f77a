# SPDX-License-Identifier: Apache-2.0
"""ParaDecode's ablations: what is recorded, what the tables say, and the script on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from paradecode_ablation import Record, Setting, row, show, take_every_draft

SCRIPT = ROOT / "benchmarks" / "paradecode_ablation.py"


def turn(record: Record, setting: Setting, base: float, seconds: float, **counts: int) -> None:
    record.add(setting, base_seconds=base, seconds=seconds, tokens=100, **counts)


def test_without_verification_every_draft_is_emitted_and_then_the_final_layer_s_token() -> None:
    metadata = SimpleNamespace(
        num_draft_tokens=[2, 0, 1],
        max_spec_len=2,
        draft_token_ids=torch.tensor([7, 8, 9], dtype=torch.int32),
        bonus_logits_indices=torch.tensor([2, 3, 5]),
    )
    logits = torch.zeros(6, 12)
    logits[2, 4] = logits[3, 5] = logits[5, 6] = 1.0
    found = take_every_draft(metadata, None, logits, None)
    assert found.sampled_token_ids.tolist() == [[7, 8, 4], [5, -1, -1], [9, 6, -1]]


def test_turns_are_on_disk_at_once_and_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = Namespace(
        out=tmp_path / "sub" / "out.json", rounds=3, minutes=8, gamma=[0.0], schedule="deferred", tokens=50
    )
    trained, unverified = Setting("deferred", "trained", 0.0, True), Setting("deferred", "trained", 0.0, False)
    first = Record(args)
    turn(first, trained, 3.0, 2.0, same_tokens=100, predicted=60, rejected=15)
    assert len(json.loads(args.out.read_text())["runs"][0]["turns"]) == 1
    second = Record(Namespace(**{**vars(args), "schedule": "parallel", "rounds": 9}))
    turn(second, trained, 4.0, 2.0, same_tokens=100, predicted=40, rejected=15)
    turn(second, unverified, 4.0, 1.0, same_tokens=20, predicted=90, rejected=0)
    third = Record(args)
    assert third.settings() == [trained, unverified]
    found = row(trained, third.turns(trained))
    assert (found["speed-up"], found["quartiles"]) == (1.75, "1.62-1.88")  # within 1.5 and 2, the two turns
    assert found["turns"] == 2
    assert found["early predictions"] == 0.5
    assert found["rejected"] == "30.0%"
    show(third)
    printed = capsys.readouterr().out
    assert "| w/o verification step | 23.83%, 1.605x | 20.00%, 4.0x |" in printed
    assert "| w/o lightweight LM head training | 71.28%, 0.863x | not measured |" in printed
    other = Record(Namespace(**{**vars(args), "tokens": 51}))
    assert other.settings() == []


def test_a_file_of_other_results_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    path.write_text('{"benchmark": "decode", "runs": []}')
    with pytest.raises(SystemExit, match="holds results of something else; give another --out"):
        Record(Namespace(out=path))


@pytest.mark.full
@pytest.mark.engine
def test_the_script(tiny_model: Callable[..., Path], fitted_heads: Callable[..., str], tmp_path: Path) -> None:
    out, data = tmp_path / "out.json", tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt_token_ids": [7 * i + 3, 40, 3, 9]}) + "\n" for i in range(2)))
    command = [sys.executable, str(SCRIPT), "--model", str(tiny_model()), "--heads", fitted_heads("early")]
    command += ["--data", str(data), "--exit-layer", "3", "--gamma", "0", "1", "--prompts", "2", "--tokens", "24"]
    command += ["--rounds", "1", "--eager", "--out", str(out)]
    for schedule in ("deferred", "parallel"):
        subprocess.run([*command, "--schedule", schedule], check=True, stdout=subprocess.DEVNULL)
    turns = [made for run in json.loads(out.read_text())["runs"] for made in run["turns"]]
    assert len(turns) == 2 * 5

    def select(**wanted: Any) -> list[dict[str, Any]]:
        return [made for made in turns if wanted.items() <= made.items()]

    assert all(made["same_tokens"] == made["tokens"] for made in select(verified=True))
    assert all(made["same_tokens"] < made["tokens"] for made in select(verified=False))
    assert all(made["predicted"] > 0 for made in select(gamma=0.0))
    assert all(made["predicted"] == 0 for made in select(gamma=1.0))
