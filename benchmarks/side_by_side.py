# SPDX-License-Identifier: Apache-2.0
"""Engines of one process that decode side by side, for machines that are not equally fast from one second to the next.

`ppd bench decode` lets whole batches decode in turn, which takes seconds each. Here a turn is a few steps: A B C,
C B A, then B C A, A C B, and so on, so that nobody always follows itself.

Weights lie in huge pages where the system has them: else the same product takes up to a fifth longer in one engine than
in another, by the pages that each happened to get.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from engines import add_up, drafter_of

from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.vllm_plugins.bench.options import kv_cache

BASE, CONTROL = "vLLM", "vLLM, again"
MOST_TOKENS = 600  # of a request, before the batch begins anew
HUGE_PAGES = {
    "THP_MEM_ALLOC_ENABLE": "1",  # torch's own
    # What vLLM packs: memory of its own for each matrix, and none that was another's before.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=65536:glibc.malloc.mmap_max=1000000",
}
Pair = tuple[int, float, int]  # tokens, seconds and steps with drafts of two turns


class Contender:
    """An engine and the requests that it decodes."""

    def __init__(self, args: argparse.Namespace, requests: int, speculative: dict[str, Any] | None = None) -> None:
        """Start it.

        Args:
            args: model, dtype, prompt_tokens and kv_cache_gib.
            requests: most that it decodes at once.
            speculative: vLLM's speculative_config.
        """
        from vllm import LLM

        self.llm = LLM(
            model=str(args.model), dtype=args.dtype, seed=0, max_num_seqs=requests,
            max_model_len=args.prompt_tokens + MOST_TOKENS + 16, enable_prefix_caching=False,
            **kv_cache(args.kv_cache_gib), speculative_config=speculative,
        )  # fmt: skip
        self.adaptive = None if speculative is None else drafter_of(self.llm).planner.adaptive
        self.always = speculative is not None and self.adaptive is None
        self.names: list[str] = []
        self.begun = 0

    def begin(self, prompts: list[list[int]], temperature: float) -> None:
        """Leave what is decoded, and take these prompts in."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        if self.names:
            engine.abort_request(self.names, internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        params = SamplingParams(
            temperature=temperature, max_tokens=MOST_TOKENS, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self.begun += 1
        self.names = [
            engine.add_request(f"{self.begun}-{i}", {"prompt_token_ids": ids}, params) for i, ids in enumerate(prompts)
        ]
        seen: set[str] = set()
        while len(seen) < len(prompts):  # until all have a token
            seen |= {output.request_id for output in engine.step()}

    @property
    def whole(self) -> bool:
        """Whether all of the batch still decode."""
        return self.llm.llm_engine.get_num_unfinished_requests() == len(self.names)

    def turn(self, steps: int) -> Pair:
        """Some steps, after one that finds its weights in no cache."""
        if self.adaptive is not None:
            self.adaptive.interrupted()
        engine = self.llm.llm_engine
        engine.step()
        started, tokens, drafting = time.perf_counter(), 0, 0
        for _ in range(steps):
            drafting += self.always or (self.adaptive is not None and self.adaptive.drafting)
            tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
        return tokens, time.perf_counter() - started, drafting


def in_turns(engines: dict[str, Contender], prompts: dict[str, list[list[int]]], temperature: float, pairs: int,
             steps: int, warm_up: int, progress: Any) -> dict[str, list[Pair]]:  # fmt: skip
    """Pairs of turns of every contender.

    Args:
        engines: by name, vLLM alone first.
        prompts: of each.
        temperature: of all requests.
        pairs: of turns, in all of which every request decodes.
        steps: of a turn.
        warm_up: steps of each before the first turn.
        progress: is told of every pair.
    """
    found: dict[str, list[Pair]] = {name: [] for name in engines}
    for name, one in engines.items():
        one.begin(prompts[name], temperature)
        for _ in range(warm_up // steps):
            one.turn(steps)
            if not one.whole:
                one.begin(prompts[name], temperature)
    while len(found[BASE]) < pairs:
        if not all(one.whole for one in engines.values()):
            for name, one in engines.items():
                one.begin(prompts[name], temperature)
        turns: dict[str, list[Pair]] = {name: [] for name in engines}
        first = len(found[BASE]) % len(engines)
        order = [*list(engines)[first:], *list(engines)[:first]]
        for name in [*order, *reversed(order)]:
            turns[name].append(engines[name].turn(steps))
        if all(one.whole for one in engines.values()):
            for name, (one, other) in turns.items():
                found[name].append((one[0] + other[0], one[1] + other[1], one[2] + other[2]))
        progress.update()
    return found


def with_huge_pages() -> None:
    """Start this command again with weights in huge pages, if it was not."""
    if any(os.environ.get(name) != value for name, value in HUGE_PAGES.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **HUGE_PAGES})


def flags(description: str | None) -> argparse.ArgumentParser:
    """Flags of the engines and of their turns."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--heads", nargs="+", required=True, help="heads folders, a contender each")
    parser.add_argument("--data", nargs="+", required=True, help="prompts, as ppd bench decode takes them")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
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
    """Add each contender's pairs of turns to a cell."""
    pairs = result["cells"].setdefault(cell, {})
    for name, own in found.items():
        pairs[name] = [*pairs.get(name, []), *own]
