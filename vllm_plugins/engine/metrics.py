# SPDX-License-Identifier: Apache-2.0
"""Our counters at /metrics, under `ppd:`, which travel with vLLM's
`vllm:spec_decode_...`.

    worker       Counters: counts; new counts are an attribute of the step's
                 ModelRunnerOutput
    scheduler    adds them to the SchedulerStats of the step, in the open dictionary of
                 KV connectors' statistics
    front end    takes them out again, and adds them to Prometheus counters

So they work where vLLM's do: with workers on other machines, and with several API
servers, each of which gets some steps. Only the wrapped calls of patches/running.py
depend on vLLM.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig

# Counters of steps without drafts, by reason: drafts are not expected to pay off; no
# request has a lookup match, or none can use drafts; more requests than
# disable_by_batch_size.
DRAFTING_OFF = tuple(
    f"drafting_off_steps/{reason}"
    for reason in ("cost", "no_match", "batch_size")
)
COST, NO_MATCH, BATCH_SIZE = DRAFTING_OFF
# Counters of steady steps of decoding alone, with drafts and without: steps, seconds,
# tokens of a request
SERVED, SERVED_PLAIN = (
    tuple(f"served_{what}/{drafts}" for what in ("steps", "seconds", "tokens"))
    for drafts in ("drafts", "no_drafts")
)
WITHOUT_DRAFTS = "estimated_seconds_without_drafts"

COUNTERS = {
    "deferred_steps": (
        "Engine steps that ran only the deep pass, from saved states, or nothing."
    ),
    "fallback_steps": "Engine steps that ran the full forward.",
    "suppressed_drafts": (
        "Drafts suppressed because they were not expected to gain time (adaptive)."
    ),
    **dict.fromkeys(
        DRAFTING_OFF, "Engine steps after which no request drafted, by reason."
    ),  # after a slash
    "exploration_steps": (
        "Engine steps with another number of drafts than expected to be best, which "
        "measure it (adaptive)."
    ),
    **dict.fromkeys(
        (*SERVED, *SERVED_PLAIN),
        "Steps that only decode, their seconds, and their tokens per request, by whether "
        "they had drafts (adaptive).",
    ),
    WITHOUT_DRAFTS: (
        "Estimated seconds that the timed steps with drafts would have taken without "
        "drafts (adaptive)."
    ),
    "invalid_drafts": (
        "Times that the drafts of a request were dropped because logits were not finite."
    ),
    "lookup_steps": (
        "Engine steps after which a request drafted by prompt lookup "
        "(prompt_lookup_min)."
    ),
    "learned_positions": "Positions of answers that heads were learned from.",
    "learned_solutions": "Learned heads that came into use.",
    "unverified_tokens": (
        "Tokens emitted without verification (method dynamo with verify: false)."
    ),
    "drafting_seconds": "Seconds of host time spent in drafting.",
    "group_micro_steps": (
        "Micro-steps of a worker group: passes of the last stage within group steps."
    ),
    "group_hits": (
        "Tokens that a worker group had started before the target chose them."
    ),
    "group_misses": "Tokens that no candidate of a worker group had started.",
    "group_candidates": "Candidates that a worker group ran through the first stage.",
    "group_candidates_discarded": "Candidates whose token the target did not choose.",
    "group_tokens": "Tokens that a worker group emitted in its steps.",
    "group_first_stage_layers": (
        "Layers that the first stage computed for these, each counted per token and "
        "request."
    ),
    "group_last_stage_layers": (
        "Layers that the last stage computed for these, each counted per token and "
        "request."
    ),
}
INFO = "ppd_info"
_COLUMN = {name: column for column, name in enumerate(COUNTERS)}
GROUP = "group_"  # prefix of a worker group's counters
# Of a ModelRunnerOutput: counts, and whether each request had a lookup match
ATTRIBUTE = "vllm_ppd_counts"
MATCHED = "vllm_ppd_matched"
STATISTICS = "vllm_ppd"  # in the statistics of KV connectors

Counts = dict[str, float]  # counter -> amount


class Counters:
    """The worker's side; only the counts of the first rank of a pipeline stage are published."""

    def __init__(self) -> None:
        self.values = np.zeros(len(COUNTERS))  # since the last take

    def add(self, name: str, amount: float = 1) -> None:
        self.values[_COLUMN[name]] += amount

    def take(self) -> np.ndarray:
        """The counts since the last call: [counters]."""
        new = self.values.copy()
        self.values[:] = 0
        return new

    def attach(self, output: Any) -> None:
        """Attach new counts to a step's output."""
        if not self.values.any():
            return
        amounts = zip(COUNTERS, self.take().tolist(), strict=True)
        new = {name: amount for name, amount in amounts if amount}
        setattr(output, ATTRIBUTE, new)


class Published:
    """The front end's side: Prometheus counters with vLLM's labels, and `ppd_info`.

    Args:
        model_name: the value of vLLM's label.
        engines: their numbers.
        config: of the engines; counters of a worker group are absent without one.
    """

    # One table for the process, whose registry takes a name once
    _counters: dict[str, Any] = {}  # noqa: RUF012

    def __init__(
        self, model_name: str, engines: Sequence[int], config: DraftingConfig
    ) -> None:
        from prometheus_client import Counter, Gauge

        facts = {
            "version": platform.version(),
            "method": config.method,
            "heads": str(config.model or ""),
            "verify": str(config.verify).lower(),
        }
        if INFO not in self._counters:
            self._counters[INFO] = Gauge(
                INFO,
                "vllm-ppd's version and what drafts; the value is 1.",
                labelnames=["model_name", "engine", *facts],
                multiprocess_mode="mostrecent",
            )
        for engine in engines:
            self._counters[INFO].labels(
                model_name, str(engine), *facts.values()
            ).set(1)
        self._series: dict[tuple[str, int], Any] = {}
        for name, text in COUNTERS.items():
            if name.startswith(GROUP) and config.stages == 1:
                continue
            base, _, reason = name.partition("/")
            of_reason = {"reason": reason} if reason else {}
            if base not in self._counters:
                labels = ["model_name", "engine", *of_reason]
                self._counters[base] = Counter(
                    f"ppd:{base}", text, labelnames=labels
                )
            for engine in engines:
                # Exported as 0 from the start
                self._series[name, engine] = self._counters[base].labels(
                    model_name, str(engine), *of_reason.values()
                )

    def observe(self, counts: Counts, engine: int) -> None:
        for name, amount in counts.items():
            if (name, engine) in self._series:
                self._series[name, engine].inc(amount)
