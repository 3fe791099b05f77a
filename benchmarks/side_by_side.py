# SPDX-License-Identifier: Apache-2.0
"""Engines of one process that decode side by side, for machines that are not equally fast from one second to the next.

`ppd bench decode` lets whole batches decode in turn, which takes seconds each. Here a turn is a few steps, and each
contender's is between two of vLLM alone, whose speed then is the machine's: 1 A 2 B 3 and back, then 2 B 3 A 1 and
back, and so on. Engines of vLLM alone are one more than contenders: so each has as many turns, and texts as long. In
this order they are started, too.

What is measured while a hypervisor gives more than --most-stolen of the processors' time to other machines does not
count, and is measured anew: up to RETAKEN times as much as is asked for.

Weights lie in huge pages where the system has them, and on a CPU all engines read one copy of those that are equal:
else the same product takes up to a fifth longer in one engine than in another, by the memory that each happened to get.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from engines import add_up, drafter_of

from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.vllm_plugins.bench.huge_pages import huge_pages
from vllm_ppd.vllm_plugins.bench.options import kv_cache

BASE, CONTROL = "vLLM", "vLLM, again"
ALL = "all"


def plain_names(others: int) -> tuple[str, ...]:
    """Names of the engines of vLLM alone beside so many others."""
    return BASE, CONTROL, *(f"{BASE}, {number}" for number in range(3, others + 2))


RESAMPLES = 2000  # of what was measured, for the interval in which a ratio lies
RETAKEN = 3
MOST_TOKENS = 600  # of a request, before the batch begins anew


class Stolen:
    """How much of the processors' time goes to other machines, where the system tells (Linux)."""

    def __init__(self) -> None:
        self._before = self._ticks()

    def share(self) -> float:
        """Of the time since it was asked last."""
        now, before = self._ticks(), self._before
        self._before = now
        return (now[1] - before[1]) / max(now[0] - before[0], 1)

    def _ticks(self) -> tuple[int, int]:
        """All, and those stolen."""
        try:
            ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        except OSError:
            return 0, 0
        return sum(ticks), ticks[-1]


def undisturbed(most_stolen: float, run: Callable[[], Any]) -> Any:
    """What run() comes to while other machines have no larger share of the time; None if they always have."""
    stolen = Stolen()
    for _ in range(1 + RETAKEN):
        stolen.share()
        found = run()
        if stolen.share() <= most_stolen:
            return found
    return None


class Turn(NamedTuple):
    """A few steps of an engine."""

    tokens: int
    seconds: float
    drafting: int = 0  # steps with drafts


class Pair(NamedTuple):
    """A contender's turns there and back, and those of vLLM alone right before and after them."""

    tokens: int
    seconds: float
    drafting: int  # steps with drafts
    plain_tokens: int
    plain_seconds: float


class Contender:
    """An engine and the requests that it decodes."""

    def __init__(self, args: argparse.Namespace, requests: int, speculative: dict[str, Any] | None = None,
                 context: int | None = None) -> None:  # fmt: skip
        """Start it.

        Args:
            args: model, dtype, prompt_tokens and kv_cache_gib.
            requests: most that it decodes at once.
            speculative: vLLM's speculative_config.
            context: most tokens of a request (None: MOST_TOKENS after the prompt).
        """
        from vllm import LLM

        pack_once()
        self.llm = LLM(
            model=str(args.model), dtype=args.dtype, seed=0, max_num_seqs=requests,
            max_model_len=context or args.prompt_tokens + MOST_TOKENS + 16, enable_prefix_caching=False,
            **kv_cache(args.kv_cache_gib), speculative_config=speculative,
        )  # fmt: skip
        self.adaptive = None if speculative is None else drafter_of(self.llm).planner.controller
        self.always = speculative is not None and self.adaptive is None
        self.names: list[str] = []
        self.begun = 0

    def begin(self, prompts: list[list[int]], temperature: float) -> None:
        """Leave what is decoded, and take these prompts in."""
        engine = self.llm.llm_engine
        if self.names:
            engine.abort_request(self.names, internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        self.begun += 1
        self.names = [self.add(f"{self.begun}-{i}", ids, temperature, MOST_TOKENS) for i, ids in enumerate(prompts)]
        seen: set[str] = set()
        while len(seen) < len(prompts):  # until all have a token
            seen |= {output.request_id for output in engine.step()}

    def add(self, name: str, prompt: list[int], temperature: float, tokens: int) -> str:
        """Send a request for so many tokens; returns the engine's name for it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        found: str = self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return found

    @property
    def drafting(self) -> bool:
        """Whether the step that comes next has drafts."""
        return self.always or (self.adaptive is not None and self.adaptive.drafting)

    @property
    def whole(self) -> bool:
        """Whether all of the batch still decode."""
        return self.llm.llm_engine.get_num_unfinished_requests() == len(self.names)

    def turn(self, steps: int) -> Turn:
        """Some steps, after one that finds its weights in no cache."""
        engine = self.llm.llm_engine
        engine.step()
        started, tokens, drafting = time.perf_counter(), 0, 0
        for _ in range(steps):
            drafting += self.drafting
            tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
        return Turn(tokens, time.perf_counter() - started, drafting)


def in_turns(engines: dict[str, Contender], prompts: dict[str, list[list[int]]], temperature: float, pairs: int,
             steps: int, warm_up: int, progress: Any, most_stolen: float) -> dict[str, list[Pair]]:  # fmt: skip
    """Pairs of turns of every contender.

    Args:
        engines: by name, those of plain_names first.
        prompts: of each.
        temperature: of all requests.
        pairs: of turns, in all of which every request decodes.
        steps: of a turn.
        warm_up: steps of each before the first turn.
        progress: is told of every pair.
        most_stolen: share of the time that other machines may have in a pair.
    """
    if 2 * (steps + 1) > MOST_TOKENS:
        sys.exit(f"turns of {steps} steps: a pair of them does not fit {MOST_TOKENS} tokens; give fewer --steps")
    found: dict[str, list[Pair]] = {name: [] for name in engines}
    for name, one in engines.items():
        one.begin(prompts[name], temperature)
        for _ in range(warm_up // steps):
            one.turn(steps)
            if not one.whole:
                one.begin(prompts[name], temperature)
    plain = list(engines)[: len(engines) // 2 + 1]
    others = list(engines)[len(plain) :]
    stolen, disturbed = Stolen(), 0
    while len(found[BASE]) < pairs and disturbed < RETAKEN * pairs:
        if not all(one.whole for one in engines.values()):
            for name, one in engines.items():
                one.begin(prompts[name], temperature)
        there = between(others, plain, len(found[BASE]))
        order = [*there, *reversed(there)]
        stolen.share()
        taken = [(name, engines[name].turn(steps)) for name in order]
        if stolen.share() > most_stolen:
            disturbed += 1
            progress.set_postfix_str(f"{disturbed} disturbed")
        elif all(one.whole for one in engines.values()):
            for name, pair in paired(taken, plain).items():
                found[name].append(pair)
            progress.update()
    progress.update(pairs - len(found[BASE]))
    return found


def between(others: list[str], plain: list[str], first: int) -> list[str]:
    """1 A 2 B 3: the others, the first-th at first, each between two of vLLM alone."""
    begin = first % len(others)
    turns = [*others[begin:], *others[:begin], ""]
    begin = first % len(plain)
    return [name for both in zip([*plain[begin:], *plain[:begin]], turns, strict=True) for name in both if name]


def started(names: list[str], order: list[str], start: Callable[[str], Any]) -> dict[str, Any]:
    """What start gives for each of the names, in their order; they are started in another.

    Who starts first finds other memory than who starts last, and may be faster or slower for as long as it runs.
    """
    found = {name: start(name) for name in order}
    return {name: found[name] for name in names}


def paired(taken: list[tuple[str, Turn]], plain: list[str]) -> dict[str, Pair]:
    """What turns in a row come to, for each engine; those of vLLM alone are held against all of these."""
    beside: dict[str, list[Turn]] = {}
    own: dict[str, list[Turn]] = {}
    for i, (name, turn) in enumerate(taken):
        own.setdefault(name, []).append(turn)
        if name not in plain:
            beside.setdefault(name, []).extend((taken[i - 1][1], taken[i + 1][1]))
    every = [turn for name, turn in taken if name in plain]
    return {
        name: Pair(
            sum(turn.tokens for turn in turns), sum(turn.seconds for turn in turns),
            sum(turn.drafting for turn in turns), sum(turn.tokens for turn in beside.get(name, every)),
            sum(turn.seconds for turn in beside.get(name, every)),
        )
        for name, turns in own.items()
    }  # fmt: skip


def pack_once() -> None:
    """Have vLLM's CPU backend pack equal matrices once, whichever engines of this process they are of.

    Where oneDNN has no product of a type (bfloat16 needs AVX-512 or AMX), vLLM catches the error and takes torch's over
    matrices of each engine's own: this says so, as their places in memory then differ.
    """
    from vllm import _custom_ops

    stock = _custom_ops.create_onednn_mm
    if hasattr(stock, "__wrapped__"):
        return
    packed: dict[tuple[Any, ...], Any] = {}
    unpacked: set[torch.dtype] = set()

    @wraps(stock)
    def once(weight: torch.Tensor, *rest: int) -> Any:
        content = hashlib.blake2b(weight.t().contiguous().view(torch.uint8).numpy()).digest()
        key = (weight.shape, weight.dtype, content, rest)
        if key not in packed:
            try:
                packed[key] = stock(weight, *rest)
            except RuntimeError:
                if weight.dtype not in unpacked:
                    unpacked.add(weight.dtype)
                    print(f"oneDNN packs no {weight.dtype} here: each engine reads its own weights, by torch's product")
                raise
        return packed[key]

    _custom_ops.create_onednn_mm = once


def with_huge_pages() -> None:
    """Start this command again with weights in huge pages, if it was not."""
    wanted = huge_pages()
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def flags(description: str | None, parents: Sequence[argparse.ArgumentParser] = ()) -> argparse.ArgumentParser:
    """Flags of the engines and of their turns."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, parents=parents
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--heads", nargs="+", required=True, help="heads folders, a contender each")
    parser.add_argument("--data", nargs="+", required=True, help="prompts, as ppd bench decode takes them")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--most-stolen", type=float, default=0.02, help="of the time, by other machines")
    return parser


def begun(benchmark: str, args: argparse.Namespace, apart: tuple[str, ...]) -> dict[str, Any]:
    """What is to be written to args.out: the cells that are there, and where this run comes from.

    Args:
        benchmark: its name.
        args: its flags.
        apart: those in which runs that add up may differ.
    """
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("out", *apart)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = provenance(benchmark=benchmark, model=str(args.model), settings=settings, cells={}, rows=[])
    if args.out.exists():
        earlier = json.loads(args.out.read_text())
        if not add_up(earlier, result):
            sys.exit(f"{args.out} is of another commit, machine or other settings; give another --out, or remove it")
        result["cells"] = earlier["cells"]
    return result


def add_pairs(result: dict[str, Any], cell: str, found: dict[str, list[Pair]]) -> None:
    """Add each contender's pairs of turns to a cell; one without any is none."""
    if not found[BASE]:
        return
    pairs = result["cells"].setdefault(cell, {})
    for name, own in found.items():
        pairs[name] = [*pairs.get(name, []), *own]


def joined(cells: list[str]) -> list[tuple[float | str, str, list[str]]]:
    """What is said of several cells at once, "temperature/other": all of the same other, of the same temperature, all.

    Returns:
        Temperature, other ("all" for one that is not the same) and cells of each; none but the last is of a single one.
    """
    pairs = [(cell, *cell.split("/")) for cell in cells]
    found: list[tuple[float | str, str, list[str]]] = []
    for same in dict.fromkeys(other for *_, other in pairs):
        found.append((ALL, same, [cell for cell, _, other in pairs if other == same]))
    for same in dict.fromkeys(temperature for _, temperature, _ in pairs):
        found.append((float(same), ALL, [cell for cell, temperature, _ in pairs if temperature == same]))
    return [one for one in found if 1 < len(one[2]) < len(cells)] + [(ALL, ALL, cells)]


def mean_ratio(ratios: list[float], samples: list[np.ndarray]) -> tuple[float, str]:
    """The geometric mean of several cells' ratios, and where it lies by their samples."""
    return round(statistics.geometric_mean(ratios), 3), interval(np.exp(np.mean(np.log(samples), axis=0)))


def interval(samples: np.ndarray) -> str:
    """Where nine of ten samples lie."""
    low, high = np.quantile(samples, (0.05, 0.95))
    return f"{low:.3f}-{high:.3f}"
