# SPDX-License-Identifier: Apache-2.0
"""A calibration as tables like the papers'."""

from typing import Any

from vllm_ppd.heads.in_words import setting_in_words, table
from vllm_ppd.heads.kinds import KINDS, calibration_of
from vllm_ppd.heads.measured import Timed

LABELS = {
    "default_exit_layers": "exit layer", "num_speculative_tokens": "drafts per step",
    "draft_vocab_size": "draft vocabulary", "cycle_in_passes": "passes per step",
}  # fmt: skip
APART = {"predicted_speedup", "acceptance_length", "calibration"}


def report(result: dict[str, Any]) -> str:
    """Markdown: every part's tables, then the recommendation."""
    kind = result["kind"]
    parts = KINDS[kind].parts.model_validate(result["parts"])
    return "\n\n".join([
        f"{kind} heads for {result['target']}; {result['machine']}",
        *calibration_of(kind).tables(parts), _timing(parts.timing.seconds), _recommended(result["recommendation"]),
    ])  # fmt: skip


def _recommended(chosen: dict[str, Any]) -> str:
    gains = chosen["predicted_speedup"] > 1
    blame = "" if gains else ": no setting of these heads gains with this text"
    if "acceptance_length" not in chosen:
        return f"Recommended: no drafting{blame}"
    settings = [
        f"{LABELS.get(name, name)} {setting_in_words(name, value)}"
        for name, value in chosen.items() if name not in APART
    ]  # fmt: skip
    text = (
        f"Recommended (sampled texts, batch 1, by weights read): {'; '.join(settings)}; acceptance length "
        f"{chosen['acceptance_length']:.3f}, predicted speed-up {chosen['predicted_speedup']:.2f}x{blame}"
    )
    text += "\n\nThis is a prediction without the host's work, and no measurement (`ppd bench decode`)."
    measured = chosen.get("calibration")
    if measured is None:
        return text
    return f"{text}\n\nBy load, by the times above: {setting_in_words('calibration', measured)}"


def _timing(seconds: Timed) -> str:
    rows = [[name, *(f"{1e3 * value:.3f}" for value in by.values())] for name, by in seconds]
    title = "Milliseconds by batch size (transformers, eager; servers differ)"
    return f"{title}\n\n" + table(["", *seconds.layer], rows)
