# SPDX-License-Identifier: Apache-2.0
"""Choices of a fit by measured speeds: how much data, which heads, how many steps, how many prompts."""

import time
from collections.abc import Iterator
from typing import Any

from vllm_ppd.heads.fitting.data import HELD_OUT
from vllm_ppd.heads.fitting.state import State
from vllm_ppd.heads.generation.write import Writer
from vllm_ppd.heads.progress import Stage
from vllm_ppd.heads.training.loop import Speed

LEAST_CHATS = 3 * HELD_OUT  # of each file, even if time is short
VOCABULARY = 8192  # most frequent tokens over which heads are trained, if the vocabulary is larger
LEAST_PASSES, MOST_PASSES = 3.0, 16.0  # over the data: larger heads are chosen if there is time for the fewest
MEASURING = 0.25  # of the training time, after which no smaller heads are timed
EVALUATIONS, PATIENCE = 12, 6  # of a training run, and how many may pass without improvement
CHECKPOINT_SECONDS = 30.0  # of training that a killed run may lose
NEW_TOKENS = 128  # of the texts for the figures
SLOWER = 3.0  # transformers' time to write a token relative to vLLM's


class Enough:
    """Ends the writing of a file of chats when the unfinished ones need the rest of its time.

    Args:
        state: where the number of chats is kept, once it is known.
        stage: tells the time.
        name: of the file.
        share: of the time that the stage has left when the engine has started.
        longest: tokens of a response at most.
    """

    def __init__(self, state: State, stage: Stage, name: str, share: float, longest: int) -> None:
        self._state, self._stage, self._name, self._share, self._longest = state, stage, name, share, longest
        self._began: tuple[float, int, int] | None = None
        self._until = 0.0  # seconds of the stage
        self._rate = 0.0  # tokens per second

    def __call__(self, writer: Writer) -> None:
        now, generated, count = time.monotonic(), writer.engine.generated, writer.file.count
        if self._began is None:
            self._began, spent = (now, generated, count), self._stage.seconds
            self._until = spent + self._share * (self._stage.planned - spent)
        began, first, written = self._began
        if count == written:  # no chat can begin before another ends
            return
        self._rate = (generated - first) / (now - began)
        length = min(self._longest, (generated - first) / (count - written))  # at most, as some are not yet written
        begun, left = count + writer.open, length * writer.running / self._rate
        if LEAST_CHATS <= begun < writer.wanted and self._stage.seconds + left >= self._until:
            writer.wanted = begun
            self.choose(begun)

    def choose(self, chats: int) -> None:
        """Keep the number of chats, if none is kept."""
        self._state.choose(self._name, lambda: {"chats": chats, "tokens_a_second": round(self._rate, 1)})


def batch_of(minutes: float, on_gpu: bool) -> int:
    """Chats at a time: as many as fill the machine, but on a CPU few enough to end within the time."""
    return 256 if on_gpu else 64 if minutes < 30 else 128


def windows(tokens: int, longest: int) -> dict[str, Any]:
    """Training options for a number of tokens and a model's largest number of positions."""
    length = max(8, min(512, longest, tokens // 32))
    return {"sequence_length": length, "batch_size": 4, "held_out": 0.08, "evaluation_tokens": 32 * length}


def state_bytes(tokens: int, hidden_size: int) -> int:
    """Bytes on disk of four layers' states and of the likeliest tokens beside them."""
    return tokens * (4 * 2 * hidden_size + 16 * 6)


def heads(num_layers: int, vocab_size: int) -> Iterator[dict[str, Any]]:
    """Options of CP heads, from those that accept most to those that train fastest.

    Args:
        num_layers: of the target; 0 where it cannot give their states.
        vocab_size: of the target.
    """
    vocabulary = VOCABULARY if vocab_size > VOCABULARY else 0
    # Higher ranks accept no more drafts on top of a recurrent state (benchmarks/results/cp_conditions.json).
    recurrent = {"condition": "recurrent", "rank": 1, "dropout": 0.1, "train_vocab_size": vocabulary}
    if num_layers >= 4:
        yield recurrent | {"layers": tuple(round(share * num_layers / 4) for share in (1, 2, 3))}
    yield recurrent


def passes_in(seconds: float, speed: Speed) -> float:
    """Passes over the data that a training makes in a number of seconds."""
    first = speed.steps * (speed.step + speed.target)
    return min(seconds / first if seconds < first else 1 + (seconds - first) / (speed.steps * speed.step), MOST_PASSES)


def schedule(passes: float, speed: Speed) -> dict[str, int]:
    """Options for how long to train, and when to evaluate and to write checkpoints."""
    steps = max(1, round(passes * speed.steps))
    return {
        "steps": steps, "evaluate_every": -(-steps // EVALUATIONS), "patience": PATIENCE,
        "save_every": max(1, min(round(CHECKPOINT_SECONDS / speed.step), steps)),
    }  # fmt: skip


def prompts_in(seconds: float, rate: float, held_out: int) -> int:
    """Prompts that a calibration can answer, each twice, if vLLM writes `rate` tokens per second."""
    affordable = int(seconds * rate / (2 * NEW_TOKENS * SLOWER))
    return max(1, min(held_out, max(HELD_OUT, affordable), 128))
