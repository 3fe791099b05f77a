# SPDX-License-Identifier: Apache-2.0
"""The records of the drafting methods by name, which everything that lists methods
reads.

Their classes are dotted paths, so that nothing loads before it is used.
"""

from dataclasses import dataclass, replace

ENGINE = "vllm_ppd.vllm_plugins.engine"
METHOD = "vllm_ppd.vllm_plugins.methods"
OURS = "vllm_ppd."  # beginning of the paths of our classes
# vLLM starts this worker for every method but a worker group
WORKER = f"{ENGINE}.worker.DraftingWorker"
# Its scheduler, by whether vLLM schedules asynchronously
SCHEDULERS = {
    False: f"{ENGINE}.scheduler.SyncDraftingScheduler",
    True: f"{ENGINE}.scheduler.AsyncDraftingScheduler",
}


@dataclass(frozen=True)
class MethodSpec:
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
    request_options: tuple[str, ...] = ()  # the same for request options
    # Worker of both stages and scheduler, of a method with a worker group
    group_worker: str = ""
    group_scheduler: str = ""


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
    "ppd": replace(
        EARLY,
        options=(*EARLY.options, "candidates", "heads"),
        group_worker=f"{METHOD}.group.runner.GroupWorker",
        group_scheduler=f"{METHOD}.group.scheduler.GroupScheduler",
    ),
    "paradecode": EARLY,
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
        request_options=("eps_b",),
    ),
    "lookup": MethodSpec(
        "prompt lookup",
        drafter=f"{ENGINE}.lookup.LookupDrafter",
        looks_up_alone=True,
    ),
    "recurrent": MethodSpec(
        "recurrent drafting",
        drafter=f"{METHOD}.recurrent.RecurrentDrafter",
        heads="recurrent",
        needs_heads=True,
        options=("draft_vocab_size",),
    ),
}

# The first method of each kind of heads.
METHOD_OF_HEADS = {
    method.heads: name
    for name, method in reversed(METHODS.items())
    if method.heads is not None
}
