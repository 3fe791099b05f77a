# SPDX-License-Identifier: Apache-2.0
"""States of the target on disk: what is read is what the target computes, once, and bounded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import Factory, full_but, patterned_texts, write_texts
from safetensors.torch import load_file

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.training import loop, tokens
from vllm_ppd.heads.training.states import Reads, StatesCache
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch, TokenStore

ROUNDED = {"rtol": 1e-2, "atol": 1e-2}  # bfloat16
ALL = Reads(exits=(2, 4), stem=True, top_k=5)
ROOM = 10**9
SMALL: dict[str, dict[str, Any]] = {
    "early": {"exit_layers": (2, 4)},
    "cp": {},
    "dynamo": {},
    "recurrent": {},
}


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    data = write_texts(tmp_path / "data.jsonl", patterned_texts(40, 3))
    return TokenStore(
        tmp_path / "work", [data], tiny.make_tokenizer(), tiny.VOCAB, 0.2, 32
    )


def load(tiny_model: Callable[..., Path], family: str = "llama") -> Target:
    return Target(str(tiny_model(family)), torch.device("cpu"), torch.float32)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Windows of every pass of a target from now on."""
    passes: list[int] = []
    run = Target.run

    def noted(self: Target, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        passes.append(len(batch.input_ids))
        return run(self, batch, *args, **kwargs)

    monkeypatch.setattr(Target, "run", noted)
    return passes


@pytest.mark.parametrize(
    "family", full_but(("llama", "gemma3", "gpt_oss"), tiny.FAMILIES)
)
def test_cached_states_are_the_targets(
    tiny_model: Factory, tmp_path: Path, store: TokenStore, family: str
) -> None:
    target = load(tiny_model, family)
    # In which rounding sends no token to another expert
    batch = store.batch("train", [3, 1, 5])
    cache = StatesCache(tmp_path / "cache", target, store, ALL, ROOM)
    direct = target.run(batch, ALL.exits, stem=True)
    assert direct.stem is not None
    layer = target.layers[-1]
    for _ in range(2):  # computed, then read
        cached = cache.states(batch)
        torch.testing.assert_close(cached.final, direct.final, **ROUNDED)
        for exit_layer in ALL.exits:
            torch.testing.assert_close(
                cached.exits[exit_layer], direct.exits[exit_layer], **ROUNDED
            )
        # The last layer, called as the stem says, does the same: states, masks and
        # rotary embeddings.
        assert cached.stem is not None
        ours, theirs = (
            layer(*stem[0], **stem[1]) for stem in (cached.stem, direct.stem)
        )
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
        log_probs = torch.log_softmax(direct.final @ target.unembedding.T, dim=-1)
        best = log_probs.topk(5)
        assert cached.top_ids is not None and cached.top_log_probs is not None
        assert torch.equal(cached.top_ids, best.indices)
        torch.testing.assert_close(cached.top_log_probs, best.values, **ROUNDED)
    after = target.run(batch, ALL.exits, stem=True)  # its layers do what they did
    assert torch.equal(after.final, direct.final)


def test_each_window_is_computed_once(
    tiny_model: Factory,
    tmp_path: Path,
    store: TokenStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = load(tiny_model)
    passes = counted(monkeypatch)
    cache = StatesCache(tmp_path / "cache", target, store, Reads(exits=(2, 5)), ROOM)
    for windows in ([0, 1, 2], [2, 3], [1, 3]):
        cache.states(store.batch("train", windows))
    assert passes == [3, 1]
    # Other kinds of heads read the same files: layer 5 is the stem of the model's last
    # layer.
    again = StatesCache(
        tmp_path / "cache", load(tiny_model), store, Reads(stem=True), ROOM
    )
    again.states(store.batch("train", [0, 3]))
    StatesCache(tmp_path / "cache", load(tiny_model), store, Reads(), ROOM).states(
        store.batch("train", [0, 3])
    )
    assert passes == [3, 1]
    again.states(store.batch("held_out", [0]))
    assert passes == [3, 1, 1]


def test_another_target_has_files_of_its_own(
    tiny_model: Factory, tmp_path: Path, store: TokenStore
) -> None:
    target = load(tiny_model)
    first = StatesCache(tmp_path / "cache", target, store, Reads(), ROOM)
    with torch.no_grad():  # same tokenizer and LM head, as a fine-tuned copy may have
        target.layers[2].mlp.down_proj.weight.mul_(1.01)
    assert (
        StatesCache(tmp_path / "cache", target, store, Reads(), ROOM).folder
        != first.folder
    )


def test_other_tokens_have_files_of_their_own(
    tiny_model: Factory, tmp_path: Path, store: TokenStore
) -> None:
    target = load(tiny_model)
    first = StatesCache(tmp_path / "cache", target, store, Reads(), ROOM)
    data = write_texts(tmp_path / "other.jsonl", patterned_texts(41, 3))
    words = tiny.make_tokenizer()
    other = TokenStore(tmp_path / "other", [data], words, tiny.VOCAB, 0.2, 32)
    assert (
        StatesCache(tmp_path / "cache", target, other, Reads(), ROOM).folder
        != first.folder
    )


def test_bounds(
    tiny_model: Factory,
    tmp_path: Path,
    store: TokenStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = load(tiny_model)
    folder = tmp_path / "cache"
    with pytest.raises(TrainingError, match="--states-cache-gb allows 1e-05"):
        StatesCache(folder, target, store, Reads(), 10_000)
    assert not folder.exists()
    cache = StatesCache(folder, target, store, Reads(), ROOM)
    for split in ("train", "held_out"):
        cache.states(store.batch(split, range(store.num_windows(split))))
    used = sum(path.stat().st_size for path in cache.folder.iterdir())
    # Its own files do not count twice
    StatesCache(folder, target, store, Reads(), used)
    with pytest.raises(TrainingError, match="--states-cache-gb allows"):
        StatesCache(folder, target, store, Reads(exits=(2, 3)), used)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100}))
    with pytest.raises(TrainingError, match=r"the disk of .* has 0\.00 GB free"):
        StatesCache(tmp_path / "other", target, store, Reads(), ROOM)


@pytest.mark.parametrize("kind", KINDS)
def test_training_over_a_cache(
    tiny_model: Factory, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs run the target over each window once, a second training not at all,
    and heads are the same.
    """
    data = write_texts(tmp_path / "data.jsonl", patterned_texts(60, 3))
    passes = counted(monkeypatch)

    def train(out: str, **options: Any) -> dict[str, torch.Tensor]:
        given = {
            "model": str(tiny_model()),
            "data": (str(data),),
            "epochs": 2,
            "sequence_length": 32,
            "batch_size": 8,
            "precision": "float32",
            "stored_dtype": "float32",
            "device": "cpu",
            "held_out": 0.2,
            **SMALL[kind],
        }
        loop.train(KINDS[kind].options(**given, out=str(tmp_path / out), **options))
        return load_file(tmp_path / out / "model.safetensors")

    cached = {"states_cache": str(tmp_path / "cache")}
    first = train("first", **cached)
    once = sum(passes)
    work = TokenStore(
        tmp_path / "work", [data], tiny.make_tokenizer(), tiny.VOCAB, 0.2, 32
    )
    assert once == work.num_windows("train") + work.num_windows("held_out")
    second = train("second", **cached)
    assert sum(passes) == once
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())
    monkeypatch.setattr(tokens, "SHIFT", 0)  # the same windows in the second epoch
    plain = train("plain")
    for name, tensor in plain.items():
        moved = (first[name].float() - tensor.float()).norm()
        assert moved <= 0.03 * tensor.float().norm(), name  # rounded states
