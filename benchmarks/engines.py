# SPDX-License-Identifier: Apache-2.0
"""What the cost benchmarks share: a model of random weights, engines in this process, timed steps, and the report."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.vllm_plugins.bench.options import kv_cache
from vllm_ppd.vllm_plugins.bench.timers import Timers

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

PROMPT_TOKENS = 64
ALIKE = ("git", "versions", "machine", "settings")  # what runs share that add up


def model_arguments(parser: argparse.ArgumentParser, layers: int, hidden: int, vocab: int) -> None:
    """Flags of the model and of the timing."""
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--hidden", type=int, default=hidden)
    parser.add_argument("--vocab", type=int, default=vocab)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=30, help="engine steps a turn")
    parser.add_argument("--turns", type=int, default=4, help="turns of each engine")
    parser.add_argument("--eager", action="store_true", help="without compilation")
    parser.add_argument("--out", type=Path, help="write the result as JSON")


def write_config(folder: Path, args: argparse.Namespace) -> Path:
    """A Llama of a few hundred million parameters, as a config alone: the weights are random."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 7 // 2,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 64,
        "num_key_value_heads": args.hidden // 64,
        "head_dim": 64,
        "vocab_size": args.vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": args.dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parameters(args: argparse.Namespace) -> int:
    """Weights of the model of write_config (vLLM's CPU backend repacks them, so they cannot be counted there)."""
    layer = 4 * args.hidden**2 + 3 * args.hidden * (args.hidden * 7 // 2) + 2 * args.hidden
    return args.layers * layer + args.vocab * args.hidden + args.hidden


class TimedStack:
    """A stack whose calls are timed."""

    def __init__(self, stack: Any, timers: Timers, part: str) -> None:
        self.stack, self.timers, self.part = stack, timers, part
        self.start, self.stop = stack.start, stack.stop

    def __call__(self, *args: Any) -> Any:
        started = time.perf_counter()
        result = self.stack(*args)
        self.timers.seconds[self.part] += time.perf_counter() - started
        return result


def start(model: Path, args: argparse.Namespace, speculative_config: dict[str, Any] | None) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype, max_model_len=1024,
        max_num_seqs=max(args.batch), max_num_batched_tokens=1024, block_size=32, **kv_cache(1),
        enable_prefix_caching=False, enforce_eager=args.eager, seed=0, speculative_config=speculative_config,
    )  # fmt: skip


def steps(llm: Any, batch: int, count: int, tag: str, before: Callable[[], None] = lambda: None) -> list[float]:
    """Seconds of each engine step in which all requests decode; before() is called when they do."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, detokenize=False)
    names = [
        engine.add_request(
            f"{tag}-{i}", {"prompt_token_ids": [(7 * i + j * j) % 1000 + 2 for j in range(PROMPT_TOKENS)]}, params
        )
        for i in range(batch)
    ]
    for _ in range(4):  # prefill, and steps until every request decodes from saved states
        engine.step()
    before()
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    engine.abort_request(names, internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


def drafter_of(llm: Any) -> Any:
    """Our proposer in an engine of this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter


def add_up(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether what was measured in two runs may be shown as one: same commit, versions, machine and settings."""
    return all(one.get(name) == other.get(name) for name in ALIKE)


def report(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], list[dict[str, Any]]],
    show: Callable[[dict[str, Any]], None],
) -> None:
    """A benchmark's main: take the flags, measure rows, show them, and write them with where they came from."""
    args = parser.parse_args()
    if args.out is not None:  # now, not after all that was measured
        args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = measure(args)
    script = Path(sys.argv[0])
    result = provenance(
        benchmark=script.stem,
        command=" ".join(["python", f"benchmarks/{script.name}", *sys.argv[1:]]),
        model=f"Llama, {parameters(args) / 1e6:.0f}M parameters, random weights, {args.layers} layers, {args.dtype}",
        settings={name: value for name, value in vars(args).items() if name != "out"},
        rows=rows,
    )
    show(result)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
