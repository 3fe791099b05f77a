# SPDX-License-Identifier: Apache-2.0
"""The records of the drafting methods by name, which everything that lists methods
reads.

Their classes are dotted paths, so that nothing loads before it is used.
"""

from typing import NamedTuple

ENGINE = "vllm_ppd.vllm_plugins.engine"
METHOD = "vllm_ppd.vllm_plugins.methods"
OURS = "vllm_ppd."  # beginning of the paths of our classes
WORKER = f"{ENGINE}.worker.DraftingWorker"
# Its scheduler, by whether vLLM schedules asynchronously
SCHEDULERS = {
    False: f"{ENGINE}.scheduler.DraftingScheduler",
    True: f"{ENGINE}.scheduler.AsyncDraftingScheduler",
}


class MethodSpec(NamedTuple):
    """A drafting method."""

    title: str  # as in the start-up log line
    drafter: str  # Drafter class
    # Drives the drafter on vLLM's model runner V2
    speculator: str = f"{ENGINE}.speculator.Speculator"
    heads: str | None = None  # kind of heads that the method reads
    needs_heads: bool = False
    looks_up_alone: bool = False  # drafts only from the requests' own texts
    # Runs parts of the target separately, so the family needs an adapter
    cuts: bool = False
    # Adds layers to the target, which some families do not support
    adds_layers: bool = False
    # Writes KV of drafted positions before they are scheduled
    writes_ahead: bool = False
    options: tuple[str, ...] = ()  # options of this method only
    stages: int = 1  # pipeline stages; with 2 the method is a worker group
    worker: str = WORKER
    scheduler: str = ""  # in place of SCHEDULERS


EARLY = MethodSpec(
    "early drafting",
    drafter=f"{METHOD}.early.drafter.EarlyExitDrafter",
    speculator=f"{METHOD}.early.speculator.DeferredKVSpeculator",
    heads="early",
    cuts=True,
    writes_ahead=True,
    options=("exit_layer", "gamma", "draft_vocab_size"),
)
METHODS: dict[str, MethodSpec] = {
    "early": EARLY,
    "lookup": MethodSpec(
        "prompt lookup",
        drafter=f"{ENGINE}.lookup.LookupDrafter",
        looks_up_alone=True,
    ),
    "group": EARLY._replace(
        title="a worker group",
        options=("exit_layer", "candidates"),
        stages=2,
        worker=f"{METHOD}.group.runner.GroupWorker",
        scheduler=f"{METHOD}.group.scheduler.GroupScheduler",
    ),
    "cp": MethodSpec(
        "CP drafting",
        drafter=f"{METHOD}.cp.CPDrafter",
        heads="cp",
        needs_heads=True,
        options=("draft_vocab_size",),
    ),
    "dynamo": MethodSpec(
        "DynaMo drafting",
        drafter=f"{METHOD}.dynamo.DynaMoDrafter",
        heads="dynamo",
        needs_heads=True,
        cuts=True,
        adds_layers=True,
        options=("eps_b", "verify", "draft_vocab_size"),
    ),
    "recurrent": MethodSpec(
        "recurrent drafting",
        drafter=f"{METHOD}.recurrent.RecurrentDrafter",
        heads="recurrent",
        needs_heads=True,
        options=("draft_vocab_size",),
    ),
}

# Stands for the method of the heads, the options or the pipeline stages, or of the
# heads that are found, or for lookup (config/naming.py)
PPD = "ppd"
PPD_OPTIONS = ("heads", "learn", "learn_dir")  # of no other method
ALIASES = (PPD, "paradecode")  # the second is another name of early


def names() -> list[str]:
    """The names by which a user may ask for a method."""
    return [*METHODS, *ALIASES]


# Of method lookup where method ppd has found no heads and learns some
LEARNING = METHODS["lookup"]._replace(
    title="prompt lookup while heads are learned",
    drafter=f"{METHOD}.cp.LearnedDrafter",
    speculator=f"{METHOD}.learning.speculator.LearningSpeculator",
)
