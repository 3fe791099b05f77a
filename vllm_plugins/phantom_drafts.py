# SPDX-License-Identifier: Apache-2.0
"""Drafts that vLLM's scheduler makes up, taken out of a step before it runs.

Where a request has one token to compute (its prompt is in the prefix cache, or it comes back from preemption), the
scheduler schedules as many drafts beside it as the engine may make, each of id -1, so that the step has one shape. The
rejection sampler would draw for them from the request's own generator, so that a seeded request said something else
than the first time, when its prompt was in no cache. The scheduler counts them as rejected, whether they ran or not.

Requests with structured output keep theirs: the grammar's mask has a row for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

PHANTOM = -1


def without_phantoms(scheduler_output: Any, requests: Mapping[str, Any]) -> Any:
    """A step of vLLM's scheduler without the drafts that nobody made.

    Args:
        scheduler_output: vLLM's, which is not changed.
        requests: the runner's, by name; the step's new ones are not among them yet.
    """
    drafts = scheduler_output.scheduled_spec_decode_tokens
    made_up = [name for name, tokens in drafts.items() if tokens and all(token == PHANTOM for token in tokens)]
    if not made_up:
        return scheduler_output
    params = {one.req_id: one.sampling_params for one in scheduler_output.scheduled_new_reqs}
    found = (params[name] if name in params else requests[name].sampling_params for name in made_up)
    free = [name for name, own in zip(made_up, found, strict=True) if own is None or own.structured_outputs is None]
    return without_drafts(scheduler_output, free)


def without_drafts(scheduler_output: Any, names: Collection[str]) -> Any:
    """A step of vLLM's scheduler without the drafts of some requests that have any, which is not changed itself."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    scheduled = dict(scheduler_output.num_scheduled_tokens)
    for name in names:
        scheduled[name] -= len(drafts[name])
    return dataclasses.replace(
        scheduler_output,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={name: tokens for name, tokens in drafts.items() if name not in names},
    )
