# SPDX-License-Identifier: Apache-2.0
"""PPD's Table 3: a worker group over two pipeline stages beside decoding without it, and beside Theorem 4.1."""

from __future__ import annotations

from vllm_ppd.benchmarks.decode.group import matched, split_of, theorem
from vllm_ppd.benchmarks.decode.options import GroupOptions
from vllm_ppd.benchmarks.harness.contenders import BASE, Contender
from vllm_ppd.benchmarks.harness.results import Row as Summary
from vllm_ppd.benchmarks.papers import PaperTable, Row, Value
from vllm_ppd.benchmarks.papers.context import Context
from vllm_ppd.benchmarks.papers.published import PPD as theirs

CANDIDATES = (1, 3)
TOKENS = 128  # of the paper's texts
MICRO_STEPS = 8  # tokens a step at most
COLUMNS = (
    "p_correct", "latency, s", "throughput, tokens/s", "latency / greedy", "by Theorem 4.1", "compute / greedy",
    "by Theorem 4.1, compute", "quartiles of the speed-up",
)  # fmt: skip
FORMS = ("{:.2%}", "{:.3f}", "{:.3f}", "{:.3f}", "{:.3f}", "{:.3f}", "{:.3f}", "{}")


def implementation(context: Context) -> PaperTable:
    folder, depth, tokens = context.heads("early")[0], context.num_layers, context.options.new_tokens
    config = {"method": "ppd", "num_speculative_tokens": MICRO_STEPS - 1, "model": folder, "disable_by_batch_size": 1}
    groups = {k: Contender(f"group, k = {k}", {**config, "candidates": k}) for k in CANDIDATES}
    # vLLM's eager stages die on the CPU where the size of the KV cache is given: no dummy run makes their buffers.
    found = context.speeds([Contender(BASE), *groups.values()], GroupOptions, eager=False)
    split = split_of({**config, "candidates": 1}, depth)
    base = found[BASE, 1]
    rows = [Row(f"{context.task.name}, greedy", _timed(base, base, tokens, None))]
    for k, contender in groups.items():
        summary = found.get((contender.name, 1))
        if summary is not None:
            rows.append(Row(_label(context.task.name, k), _timed(summary, base, tokens, (depth, split, k))))
    for task, by_k in theirs.IMPLEMENTED.items():
        rows += [Row(_label(task, k), None, _published(by_k[k], by_k[0][1], k)) for k in by_k]
    return PaperTable(
        "ppd-3", "PPD", "Table 3: the implementation result", COLUMNS, tuple(rows),
        f"Ours: vLLM's own two pipeline stages without drafting, and a worker group over them split at layer {split} "
        f"of {depth}, with early heads, one request at a time, in turns; latency is of {tokens} tokens at the median "
        "speed, compute is the layers run for a token, discarded candidates included, counted. The theorem counts "
        f"layers alone; a group also spreads a step's host work over up to {MICRO_STEPS} tokens. Theirs: LLaMA-2 13B, "
        "128 tokens, two to four GPUs; ratios and theorem computed from its match rates at the middle layer.",
        FORMS, context.settings("rounds", "new_tokens", "engine_dtype") | {"eager": False},
    )  # fmt: skip


def _label(task: str, k: int) -> str:
    return f"{task}, greedy (w/ PPD), k = {k}" if k else f"{task}, greedy"


def _timed(row: Summary, base: Summary, tokens: int, group: tuple[int, int, int] | None) -> list[Value]:
    speed = row["tokens_per_second"][0]
    timed: list[Value] = [tokens / speed, speed]
    if group is None:
        return [None, *timed, 1.0, None, 1.0, None, None]
    found, ratio, spread = matched(row, *group, tokens), 1 / row["speed_up"][0], Context.quartiles(row)
    if found is None:
        return [None, *timed, ratio, None, None, None, spread]
    depth, paper = group[0], found.paper
    return [
        found.rate,
        *timed,
        ratio,
        paper.latency / depth,
        found.layers and found.layers / depth,
        paper.compute / depth,
        spread,
    ]


def _published(values: tuple[float | None, float, float], greedy: float, k: int) -> list[Value]:
    rate, latency, throughput = values
    if rate is None:
        return [None, latency, throughput, 1.0, None, 1.0, None, None]
    paper = theorem(theirs.DEPTH, theirs.DEPTH // 2, k, rate, TOKENS)
    ratio = latency / greedy
    by_theorem = paper.latency / theirs.DEPTH, None, paper.compute / theirs.DEPTH
    return [rate, latency, throughput, ratio, *by_theorem, None]
