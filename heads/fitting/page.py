# SPDX-License-Identifier: Apache-2.0
"""The page at the end of a fit: accepted drafts, the predicted gain, and how to serve."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_ppd.heads.cp.calibration import ALL, category_tables
from vllm_ppd.heads.cp.config import CPParts
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.in_words import in_words, table
from vllm_ppd.heads.measured import on_texts
from vllm_ppd.heads.planning.gate import best_speedups, without_gain
from vllm_ppd.heads.planning.plan import SHOWN, Plan
from vllm_ppd.heads.planning.report import command
from vllm_ppd.heads.svg import bars

NAME, ACCEPTED, GAIN = "fit.md", "fit-accepted.svg", "fit-gain.svg"


def write_page(folder: Path, plan: Plan, parts: CPParts, facts: Mapping[str, Any]) -> str:
    """Write the page and its charts into a heads folder.

    Args:
        folder: of the heads.
        plan: made of their calibration.
        parts: of the calibration.
        facts: further facts to show, by name.

    Returns:
        The page.
    """
    settings = [under.decoding for under in plan.predicted]
    speedups = best_speedups(settings, SHOWN)
    accepted = {
        category: {f"draft {n}": share for n, share in enumerate(shares, start=1)}
        for category, shares in on_texts(parts.acceptance, greedy=False).by_category.items()
    }  # fmt: skip
    title = "Drafts accepted per step by kind of prompt, sampled texts"
    write_text(folder / ACCEPTED, bars(title, accepted, stacked=True))
    gains = {f"batch {size}": {"speed-up": value} for size, value in speedups.items()}
    write_text(folder / GAIN, bars("Predicted tokens per second, relative to vLLM alone", gains, reference=1.0))
    best = None if plan.best is None else plan.best.decoding
    warning = without_gain(str(folder), speedups)
    page = "\n\n".join([
        f"# Heads for {plan.target}",
        "\n".join(f"- {name}: {in_words(value)}" for name, value in facts.items()),
        "## Accepted drafts", *category_tables(parts.acceptance), f"![{title}]({ACCEPTED})",
        "## Predicted gain on this machine",
        table(["batch", *speedups], [["speed-up", *(f"{value:.2f}" for value in speedups.values())]]),
        *([f"{warning[0].upper()}{warning[1:]}."] if warning else []),
        f"![Predicted speed-up by batch]({GAIN})",
        "These are predictions, by the calibration's times and without the host's work, and may be wrong by a third or "
        "more in either direction: measure speeds with `ppd bench decode` before you serve.",
        "## Serve", f"    {command(plan.target, best, plan.stop_at, '1')}\n",
    ])  # fmt: skip
    write_text(folder / NAME, page)
    return page


def accepted_a_step(parts: CPParts) -> float:
    """Drafts accepted per step on sampled texts of all prompts."""
    return sum(on_texts(parts.acceptance, greedy=False).by_category[ALL])
