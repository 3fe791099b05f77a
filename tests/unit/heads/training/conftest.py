# SPDX-License-Identifier: Apache-2.0
"""Small trainings, by call and by command, and a Ctrl-C in the middle of one."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Factory, patterned_texts, write_texts

from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.training import loop, recipe
from vllm_ppd.heads.training.recipe import Recipe
from vllm_ppd.heads.training.tokens import Batch

COMMON = {
    "steps": 12,
    "sequence_length": 64,
    "batch_size": 4,
    "dtype": "float32",
    "save_dtype": "float32",
    "device": "cpu",
    "held_out_fraction": 0.1,
    "evaluation_tokens": 2048,
    "learning_rate": 3e-3,
}
SMALL: dict[str, dict[str, Any]] = {
    "early": {},
    "cp": {"rank": 2, "num_speculative_tokens": 2},
    "dynamo": {"mask_entries": 50},
    "recurrent": {"num_speculative_tokens": 2},
}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(
        tmp_path_factory.mktemp("data") / "data.jsonl", patterned_texts(120, 6)
    )


@pytest.fixture
def train(
    tiny_model: Factory,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Factory:
    """train(kind, family, **options): a heads folder."""

    def run(
        kind: str = "early",
        family: str | Path = "llama",
        out: str = "heads",
        **options: Any,
    ) -> Path:
        model = family if isinstance(family, Path) else tiny_model(family)
        if kind == "early":
            # A ridge of many tokens leaves nothing to learn of a random model.
            monkeypatch.setattr(recipe, "TOKENS", 1)
        settings = {**COMMON, **SMALL[kind], "data": (str(data),), **options}
        loop.train(
            KINDS[kind].options(
                **settings, model=str(model), out=str(tmp_path / out)
            )
        )
        return tmp_path / out

    return run


@pytest.fixture
def command(
    tiny_model: Factory, data: Path, tmp_path: Path
) -> Callable[..., list[str]]:
    """command(kind="early", out="heads", **options): words of a `ppd train`."""

    def words(
        kind: str = "early", out: str = "heads", **options: Any
    ) -> list[str]:
        settings = {
            **COMMON,
            "model": tiny_model(),
            "data": data,
            "out": tmp_path / out,
            "evaluation_tokens": 512,
            **options,
        }
        flags = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in settings.items()
        ]
        return ["train", kind, *flags]

    return words


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Batch]]:
    """stop_at(count): press Ctrl-C in the count-th computation of a training loss;
    returns the batches of all.
    """

    def stop(count: int) -> list[Batch]:
        batches: list[Batch] = []
        compute = Recipe.forward

        def counted(
            self: Recipe,
            batch: Batch,
        ) -> Any:
            batches.append(batch)
            if len(batches) == count:
                os.kill(os.getpid(), signal.SIGINT)
            return compute(self, batch)

        monkeypatch.setattr(Recipe, "forward", counted)
        return batches

    return stop
