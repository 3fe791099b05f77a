# SPDX-License-Identifier: Apache-2.0
"""What a step that verifies and drafts costs beside a full pass, and where the time goes, by method.

    python -m vllm_ppd.benchmarks.decode.step_breakdown --methods early --out early.json
    python -m vllm_ppd.benchmarks.decode.step_breakdown --methods cp dynamo --layers 24 --hidden 1024 --vocab 32768

Engines of one process, vLLM alone and each method, take turns on a model of random weights; medians of single engine
steps. Heads are random, too: what they cost does not depend on what they say. CP and DynaMo draft from the vocabulary
that heads recommend, and from the whole one. Formula of early drafting: n l/L + 1 full passes, the limit where memory
bandwidth is one; with the reads of the LM head at the exit beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_ppd.benchmarks.harness.contenders import BASE, Contender
from vllm_ppd.benchmarks.harness.engine import Engine, Timers
from vllm_ppd.benchmarks.harness.estimates import number, quartiles
from vllm_ppd.benchmarks.harness.machine import restart_for_engines
from vllm_ppd.benchmarks.harness.results import Row, write_rows
from vllm_ppd.heads.calibration.tables import table as markdown
from vllm_ppd.heads.cp.module import Condition
from vllm_ppd.vllm_plugins.platform import kv_cache

PROMPT_TOKENS = 64
DRAFTING = "drafting"
DEEP, LAYERS = "deep layers", "heads' layers in the forward"
OUTSIDE = (DEEP, LAYERS)  # parts of a step that are no parts of drafting
REST_OF_DRAFTING, REST = "rest of drafting (states, plan, host)", "rest of the step (verify, sample, schedule)"


def model_of(args: argparse.Namespace) -> Any:
    """A Llama of these sizes, without weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = args.hidden // 64
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=args.hidden, intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers, num_attention_heads=heads, num_key_value_heads=heads, head_dim=64,
        vocab_size=args.vocab, max_position_embeddings=2048, tie_word_embeddings=True, dtype=args.dtype,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def write_heads(folder: Path, kind: str, model: Any, args: argparse.Namespace, condition: Condition = "none") -> str:
    """A heads folder of random weights; CP heads of a condition."""
    from vllm_ppd.heads.base import TargetLayers
    from vllm_ppd.heads.cp.config import CPConfig
    from vllm_ppd.heads.dynamo.config import DynaMoConfig
    from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
    from vllm_ppd.heads.io import save_heads

    target = TargetLayers(
        model_type="llama", hidden_size=args.hidden, vocab_size=args.vocab, num_hidden_layers=args.layers
    )
    shared: dict[str, Any] = {
        "verifier": "random", "target": target, "dtype": args.dtype, "draft_vocab_size": args.draft_vocab,
    }  # fmt: skip
    config: CPConfig | DynaMoConfig
    given: dict[str, torch.Tensor]  # counts, which must fit each other
    if kind == "cp":
        config = CPConfig(
            **shared,
            rank=args.rank,
            positions=args.drafts + 1,
            num_speculative_tokens=args.drafts,
            token_counts=True,
            condition=condition,
        )
        given = {"token_counts": torch.arange(1, 1 + args.vocab)}
    else:
        text = torch.randint(args.vocab, (4 * args.vocab,)).numpy()
        counts = CoOccurrence.from_tokens([text], args.vocab, args.tokens, 1000)  # a table that few candidates are in
        given = counts.tensors()
        layer = {name: list(tensor.shape) for name, tensor in model.model.layers[-1].state_dict().items()}
        config = DynaMoConfig(
            **shared, tokens=args.tokens, num_speculative_tokens=args.tokens - 1, layer_tensors=layer,
            cooccurrence_entries={order: len(keys) for order, keys in counts.keys.items()},
        )  # fmt: skip
    shapes = {name: shape for name, shape in config.shapes().items() if name not in given}
    tensors = given | {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}
    out = folder / f"{kind}-{condition}"
    save_heads(out, config, tensors)
    return str(out)


def contenders(folder: Path, model: Any, args: argparse.Namespace) -> list[Contender]:
    """vLLM alone, and each method with every draft made."""
    found = [Contender(BASE)]
    for method in args.methods:
        if method == "early":
            early = {"method": "ppd", "exit_layer": args.exit_layer, "num_speculative_tokens": args.drafts}
            found.append(Contender(method, early | {"adaptive": False}))
            continue
        conditions: Sequence[Condition] = args.conditions if method == "cp" else ["none"]
        for condition in conditions:
            config = {"model": write_heads(folder, method, model, args, condition), "adaptive": False}
            name = method if condition == "none" else f"{method} {condition}"
            found.append(Contender(f"{name}, {args.draft_vocab} tokens", config))
            found.append(Contender(f"{name}, whole vocabulary", config | {"draft_vocab_size": args.vocab}))
    return found


class TimedStack:
    """A stack of layers whose calls are timed."""

    def __init__(self, stack: Any, timers: Timers, part: str) -> None:
        self.start, self.stop, self._call = stack.start, stack.stop, timers.timed(stack, part)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


def instrument(name: str, proposer: Any, timers: Timers) -> None:
    """Time the parts of a proposer's work."""
    timers.wrap(proposer, "draft", DRAFTING)
    drafter, target = proposer.drafter, proposer.target
    if name == "early":
        first, last = target.cut.stacks[0], target.cut.stacks[-1]
        target.cut.stacks = [TimedStack(first, timers, "shallow layers"), TimedStack(last, timers, DEEP)]
        timers.wrap(proposer.passes.attention, "build", "attention metadata of the shallow passes")
        timers.wrap(drafter.reader, "greedy", "norm and LM head at the exit")
        return
    head = target.lm_head if drafter.vocabulary is None else drafter.vocabulary
    timers.wrap(head, "logits", "one read of the LM head")
    if name.startswith("cp"):
        timers.wrap(drafter, "weights", "transforms of the experts")
        timers.wrap(drafter, "chain", "softmax, mixtures, arg-max")
        if drafter.lead:
            timers.wrap(drafter, "token", "what reads the newest token")
    else:
        timers.wrap(drafter, "choose", "joint, thresholds, back-off")
        target.cut.branches = TimedStack(target.cut.branches, timers, LAYERS)


def step_seconds(engine: Engine, batch: int, count: int, timers: Timers) -> list[float]:
    """Seconds of each engine step in which all requests decode; the timers hold what is of these steps."""
    prompts = [[(7 * i + j * j) % 100 + 2 for j in range(PROMPT_TOKENS)] for i in range(batch)]
    engine.begin(prompts, 900, 0.0)
    for _ in range(2):  # until every request decodes from saved states
        engine.step()
    timers.seconds.clear()
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(args: argparse.Namespace) -> list[Row]:
    """A row a batch size and method."""
    model = model_of(args)
    arguments = {
        "load_format": "dummy", "dtype": args.dtype, "max_model_len": 1024, "max_num_seqs": max(args.batch),
        "max_num_batched_tokens": 1024, "block_size": 32, "enable_prefix_caching": False, "enforce_eager": args.eager,
        **kv_cache(args.kv_cache_gib),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        model.config.save_pretrained(name)
        everyone = contenders(Path(name), model, args)
        engines = {one.name: Engine(one, {"model": name, **arguments}) for one in everyone}
    timers = {name: Timers() for name in engines}
    for name, engine in engines.items():
        if name != BASE:
            instrument(name, engine.worker.model_runner.drafter, timers[name])
    size = sum(parameter.numel() for parameter in model.parameters())
    rows: list[Row] = []
    for batch in args.batch:
        seconds: dict[str, list[float]] = defaultdict(list)
        parts: dict[str, list[dict[str, float]]] = defaultdict(list)
        for name, engine in engines.items():
            step_seconds(engine, batch, 4, timers[name])
        for _ in range(args.turns):
            for name, engine in engines.items():
                seconds[name] += step_seconds(engine, batch, args.steps, timers[name])
                parts[name].append({part: value / args.steps for part, value in timers[name].seconds.items()})
        plain = quartiles(seconds[BASE])
        for name in list(engines)[1:]:
            found = {part: statistics.median(one[part] for one in parts[name]) for part in parts[name][0]}
            rows.append(row(batch, name, plain, quartiles(seconds[name]), found) | formula(name, args, size))
    return rows


def row(batch: int, name: str, plain: Sequence[float], step: Sequence[float], parts: dict[str, float]) -> Row:
    """Quartiles of steps in milliseconds, and parts in units of the full pass, which add up to the step."""
    drafting = parts.pop(DRAFTING)
    inside = sum(value for part, value in parts.items() if part not in OUTSIDE)
    outside = sum(parts.get(part, 0.0) for part in OUTSIDE)
    parts |= {REST_OF_DRAFTING: drafting - inside, REST: step[0] - drafting - outside}
    return {
        "batch": batch, "method": name, "full_pass_ms": _milliseconds(plain), "step_ms": _milliseconds(step),
        "step_in_passes": round(step[0] / plain[0], 3),
        "parts_in_passes": {part: round(value / plain[0], 4) for part, value in parts.items()},
    }  # fmt: skip


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * value, 2) for value in seconds]


def formula(name: str, args: argparse.Namespace, parameters: int) -> Row:
    """Full passes of a cycle of early drafting by the formula, without and with reads of the LM head."""
    if name != "early":
        return {}
    share, head = args.exit_layer / args.layers, args.vocab * args.hidden / parameters
    with_head = args.drafts * ((1 - head) * share + head) + 1
    return {"formula": round(args.drafts * share + 1, 3), "formula_with_lm_head": round(with_head, 3)}


def table(rows: Sequence[Row]) -> str:
    """Markdown: steps, and their parts in units of the full pass."""
    steps = [
        [one["batch"], one["method"], _spread(one["full_pass_ms"]), _spread(one["step_ms"]), one["step_in_passes"],
         *(number(one.get(key), "{:.3f}") for key in ("formula", "formula_with_lm_head"))]
        for one in rows
    ]  # fmt: skip
    names = list(dict.fromkeys(part for one in rows for part in one["parts_in_passes"]))
    parts = [
        [one["batch"], one["method"], *(number(one["parts_in_passes"].get(part), "{:.3f}") for part in names)]
        for one in rows
    ]
    header = ["batch", "method", "full pass ms (quartiles)", "step ms (quartiles)", "step / pass", "formula",
              "with LM head"]  # fmt: skip
    return f"{markdown(header, steps)}\n\nIn units of the full pass:\n\n{markdown(['batch', 'method', *names], parts)}"


def _spread(found: Sequence[float]) -> str:
    return f"{found[0]:.2f}" + (f" ({found[1]:.2f}-{found[2]:.2f})" if len(found) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["early", "cp", "dynamo"], choices=["early", "cp", "dynamo"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1280)
    parser.add_argument("--vocab", type=int, default=16_384)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=30, help="engine steps a turn")
    parser.add_argument("--turns", type=int, default=4, help="turns of each engine")
    parser.add_argument("--eager", action="store_true", help="without compilation")
    parser.add_argument("--kv-cache-gib", type=float, default=1.0, help="of each engine")
    parser.add_argument("--exit-layer", type=int, default=3, help="of early drafting")
    parser.add_argument("--drafts", type=int, default=3, help="of early drafting and CP")
    parser.add_argument("--rank", type=int, default=3, help="of the CP head")
    parser.add_argument(
        "--conditions",
        nargs="+",
        default=["none"],
        choices=["none", "token", "chain"],
        help="of the CP heads, in turns",
    )
    parser.add_argument("--tokens", type=int, default=3, help="n of DynaMo-Tn")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="draft vocabulary that the heads recommend")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    restart_for_engines()
    rows = measure(args)
    print(table(rows))
    if args.out is not None:
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        size = sum(parameter.numel() for parameter in model_of(args).parameters()) / 1e6
        said = f"Llama, {size:.0f}M parameters, random weights, {args.layers} layers, {args.dtype}"
        write_rows(args.out, "step_breakdown", rows, model=said, settings=settings)


if __name__ == "__main__":
    main()
