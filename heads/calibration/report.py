# SPDX-License-Identifier: Apache-2.0
"""A calibration as tables like the papers'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_ppd.heads.calibration.tables import percent, table


def report(result: dict[str, Any]) -> str:
    """Markdown: every part's tables, then the recommendation."""
    parts, blocks = result["parts"], [f"{result['kind']} heads for {result['target']}; {result['machine']}"]
    writers = {"early": _early, "cp": _cp, "dynamo": _dynamo}
    blocks += [*writers[result["kind"]](parts, result["options"]), _timing(parts["timing"])]
    chosen = result["recommendation"]
    settings = {k: v for k, v in chosen.items() if k not in ("predicted_speedup", "acceptance_length")}
    blocks.append(
        f"Recommended (sampled texts, batch 1): {settings}; acceptance length {chosen.get('acceptance_length')}, "
        f"predicted speed-up {chosen['predicted_speedup']}x"
        + ("" if chosen["predicted_speedup"] > 1 else ": no setting of these heads gains on this text")
    )
    return "\n\n".join(blocks)


def _early(parts: dict[str, Any], options: dict[str, Any]) -> Iterator[str]:
    matches = parts["matches"]
    layers = matches["layers"]
    yield "Match rate by exit layer, greedy texts (PPD, Table 2; N untrained, Y trained)"
    yield table(["k", "trained", *layers], list(_rows(matches["match"])))
    for place, layer in enumerate(layers):
        buckets = matches["match_by_position"]
        rows = [
            [k, form, *(percent(rates[k][form][place]) for rates in buckets.values())]
            for k in matches["match"] for form in ("N", "Y")
        ]  # fmt: skip
        yield f"Match rate by token position, exit layer {layer} (PPD, Tables 6 to 8)"
        yield table(["k", "trained", *buckets], rows)
    yield "Match rate by way of decoding, k = 3 (PPD, Table 5)"
    rows = [[name, *row[1:]] for name, rates in parts["sampling"].items() for row in _rows(rates)]
    yield table(["decoding", "trained", *layers], rows)
    for name, by_form in matches["acceptance"].items():
        repeated = matches["repeated_4_grams"][name]
        yield f"Expected acceptance length by drafts n, {name} texts (repeated 4-grams {repeated})"
        count = options["drafts"]
        rows = [
            [form, layer, *(f"{counts['length']:.3f}" for counts in by_n)]
            for form, by_layer in by_form.items() for layer, by_n in by_layer.items()
        ]  # fmt: skip
        yield table(["trained", "exit", *(f"n={n}" for n in range(1, count + 1))], rows)


def _rows(rates: dict[str, dict[str, list[float]]]) -> Iterator[list[str]]:
    for k, forms in rates.items():
        for form, values in forms.items():
            yield [k, form, *map(percent, values)]


def _cp(parts: dict[str, Any], _: dict[str, Any]) -> Iterator[str]:
    found = parts["likelihood"]
    n = len(found["ppl_n"])
    yield f"Joint of {n} tokens: {found['joint_nats']} nats; the target's own PPL_1 is {found['target_ppl_1']}"
    yield table(
        ["", *(f"s={s}" for s in range(1, n + 1))],
        [
            ["PPL_s", *found["ppl_n"]],
            ["PPL_1:s", *found["ppl_1:n"]],
            ["nats given the earlier", *found["conditional_nats"]],
        ],
    )
    yield "Expected drafts accepted a step (vLLM's terms: chain drafts, length = 1 + accepted / drafts)"
    yield _acceptance(parts["acceptance"])
    yield from _vocabulary(parts["vocabulary"])


def _vocabulary(found: dict[str, Any]) -> Iterator[str]:
    """Accepted drafts by draft vocabulary, at the setting that accepts most."""
    if found:
        yield "Draft vocabularies, sampled texts (size, share of the training text, drafts accepted a step at best)"
        rows = []
        for size, by in found.items():
            best = max(c["accepted"] / c["cycles"] for c in by.get("by_drafts") or by["rows"])
            rows.append([size, percent(by["covers"]), f"{best:.3f}"])
        yield table(["tokens", "covers", "accepted a step"], rows)


def _acceptance(found: dict[str, Any]) -> str:
    rows = [
        [name, n, percent(c["rate"]), f"{c['length'] - 1:.3f}", f"{c['length']:.3f}", by["repeated_4_grams"]]
        for name, by in found.items() for n, c in enumerate(by["by_drafts"], start=1)
    ]  # fmt: skip
    return table(["texts", "drafts", "rate", "accepted a step", "length", "repeated 4-grams"], rows)


def _dynamo(parts: dict[str, Any], _: dict[str, Any]) -> Iterator[str]:
    found = parts["likelihood"]
    n = len(found["ppl_n"])
    yield "Perplexities on the data (DynaMo, Table 2)"
    names = [*(f"PPL_{i}" for i in range(1, n + 1)), *(f"PPL_1:{i}" for i in range(2, n + 1))]
    yield table(names, [[*found["ppl_n"], *found["ppl_1:n"][1:]]])
    yield "Dynamic perplexity and share of n-grams against eps_b (DynaMo, Figs. 5 and 15)"
    grams = ["unigrams", "bigrams", "trigrams", "4-grams"][:n]
    rows = [
        [by["eps_b"], by["ppl_d"], f"{by['tokens_a_pass']:.3f}", *map(percent, by["share"])]
        for by in parts["dynamic"]["by_eps_b"]
    ]
    yield table(["eps_b", "PPL_d", "tokens a pass", *grams], rows)
    yield "Verified mode: drafts accepted a step (accepted / steps; rate = accepted / drafted)"
    rows = [
        [name, row["eps_b"], row["drafts_allowed"], percent(row["rate"]), f"{row['drafted'] / row['cycles']:.3f}",
         f"{row['accepted'] / row['cycles']:.3f}", by["repeated_4_grams"]]
        for name, by in parts["acceptance"].items() for row in by["rows"]
    ]  # fmt: skip
    yield table(["texts", "eps_b", "most drafts", "rate", "drafted", "accepted", "repeated 4-grams"], rows)
    yield from _vocabulary(parts["vocabulary"])


def _timing(found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    rows = [[name, *(f"{1e3 * value:.3f}" for value in by.values())] for name, by in seconds.items()]
    title = "Milliseconds by batch size (transformers, eager; a server has its own)"
    return f"{title}\n\n" + table(["", *next(iter(seconds.values()))], rows)
