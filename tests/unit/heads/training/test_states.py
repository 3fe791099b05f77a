# SPDX-License-Identifier: Apache-2.0
"""States of the target on disk: what is read is what the target computes, once, and bounded."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import Factory, full_but, patterned_texts, write_texts
from safetensors.torch import load_file

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.training.states import Reads, StatesCache
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch, TokenStore

ROUNDED = {"rtol": 1e-2, "atol": 1e-2}  # bfloat16
ALL = Reads(exits=(2, 4), stem=True, top_k=5)
ROOM = 10**9


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "data.jsonl", patterned_texts(40, 3))


def make_store(
    folder: Path,
    data: Path,
) -> TokenStore:
    return TokenStore(
        folder,
        [data],
        tiny.make_tokenizer(),
        tiny.VOCAB,
        0.2,
        32,
    )


@pytest.fixture
def store(
    tmp_path: Path,
    data: Path,
) -> TokenStore:
    return make_store(tmp_path / "work", data)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Windows of every pass of a target."""
    counts: list[int] = []
    run = Target.run

    def noted(self: Target, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(batch.input_ids))
        return run(
            self,
            batch,
            *args,
            **kwargs,
        )

    monkeypatch.setattr(Target, "run", noted)
    return counts


@pytest.fixture
def cache(
    tiny_model: Factory,
    tmp_path: Path,
    store: TokenStore,
) -> Factory:
    """cache(reads, room, family): states of a target on disk."""

    def make(
        reads: Reads = ALL,
        room: int = ROOM,
        family: str = "llama",
    ) -> Any:
        model = str(tiny_model(family))
        target = Target(model, torch.device("cpu"), torch.float32)
        return StatesCache(
            tmp_path / "cache",
            target,
            store,
            reads,
            room,
        )

    return make


@pytest.mark.parametrize(
    "family", full_but(("llama", "gemma3", "gpt_oss"), tiny.FAMILIES)
)
def test_cached_states_are_the_targets(
    cache: Factory, store: TokenStore, family: str
) -> None:
    # In which rounding sends no token to another expert
    batch = store.batch("train", [3, 1, 5])
    made = cache(family=family)
    target = made.target
    direct = target.run(batch, ALL.exits, stem=True)
    assert direct.stem is not None
    layer = target.layers[-1]
    for _ in range(2):  # computed, then read
        cached = made.states(batch)
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
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=3e-2,
            atol=3e-2,
        )
        log_probs = torch.log_softmax(direct.final @ target.unembedding.T, dim=-1)
        best = log_probs.topk(5)
        assert cached.top_ids is not None and cached.top_log_probs is not None
        assert torch.equal(cached.top_ids, best.indices)
        torch.testing.assert_close(cached.top_log_probs, best.values, **ROUNDED)
    after = target.run(
        batch,
        ALL.exits,
        stem=True,
    )  # its layers do what they did
    assert torch.equal(after.final, direct.final)


def test_each_window_is_computed_once(
    cache: Factory, store: TokenStore, passes: list[int]
) -> None:
    made = cache(Reads(exits=(2, 5)))
    for windows in ([0, 1, 2], [2, 3], [1, 3]):
        made.states(store.batch("train", windows))
    assert passes == [3, 1]
    # Other kinds of heads read the same files: layer 5 is the stem of the model's last
    # layer.
    for reads in (Reads(stem=True), Reads()):
        cache(reads).states(store.batch("train", [0, 3]))
    assert passes == [3, 1]
    made.states(store.batch("held_out", [0]))
    assert passes == [3, 1, 1]
    # A file may lack what other heads read.
    cache(Reads(exits=(3,))).fill()
    windows = store.num_windows("train") + store.num_windows("held_out")
    assert sum(passes) == 5 + windows


def test_other_targets_and_tokens_have_files_of_their_own(
    cache: Factory, tmp_path: Path
) -> None:
    first = cache()
    target = first.target
    text = write_texts(tmp_path / "other.jsonl", patterned_texts(41, 3))
    store = make_store(tmp_path / "other", text)
    other = StatesCache(
        tmp_path / "cache",
        target,
        store,
        ALL,
        ROOM,
    )
    assert other.folder != first.folder
    with (
        torch.no_grad()
    ):  # same tokenizer and LM head, as a fine-tuned copy may have
        target.layers[2].mlp.down_proj.weight.mul_(1.01)
    tuned = StatesCache(
        tmp_path / "cache",
        target,
        store,
        ALL,
        ROOM,
    )
    assert tuned.folder != other.folder


def test_bounds(
    cache: Factory,
    tmp_path: Path,
    store: TokenStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TrainingError, match="--states-cache-gib allows 9"):
        cache(Reads(), 10_000)
    assert not (tmp_path / "cache").exists()
    made = cache(Reads())
    for split in ("train", "held_out"):
        made.states(store.batch(split, range(store.num_windows(split))))
    used = sum(path.stat().st_size for path in made.folder.iterdir())
    cache(Reads(), used)  # its own files do not count twice
    with pytest.raises(TrainingError, match="--states-cache-gib allows"):
        cache(Reads(exits=(2, 3)), used)
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _: type("Usage", (), {"free": 100})
    )
    for _ in range(2):
        with pytest.raises(
            TrainingError, match=r"the disk of .* has 0\.00 GiB free"
        ):
            cache(Reads(exits=(2,), top_k=3), family="qwen3")


@pytest.mark.parametrize("kind", KINDS)
def test_training_over_a_cache(
    train: Factory,
    tmp_path: Path,
    data: Path,
    store: TokenStore,
    kind: str,
    passes: list[int],
) -> None:
    """Two epochs run the target over each window once, a second training not at all,
    and heads are the same.
    """
    settings = {
        "epochs": 2,
        "steps": None,
        "sequence_length": 32,
        "batch_size": 8,
    }
    train = partial(
        train,
        kind,
        data=(str(data),),
        held_out_fraction=0.2,
        **settings,
    )

    def weights(out: str, **options: Any) -> dict[str, torch.Tensor]:
        return load_file(train(out=out, **options) / "model.safetensors")

    cached = {"states_cache": str(tmp_path / "cache")}
    first = weights("first", **cached)
    once = sum(passes)
    assert once == store.num_windows("train") + store.num_windows("held_out")
    second = weights("second", **cached)
    assert sum(passes) == once
    assert all(
        torch.equal(first[name], tensor) for name, tensor in second.items()
    )
    for name, tensor in weights("plain").items():
        # Rounded states, by which the first of Muon's steps change a mask from zero
        most = 0.15 if name.startswith("mask.") else 0.03
        moved = (first[name].float() - tensor.float()).norm()
        assert moved <= most * tensor.float().norm(), name
