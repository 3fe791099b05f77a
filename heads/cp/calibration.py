# SPDX-License-Identifier: Apache-2.0
"""Expected acceptance of CP heads, and of other heads with the interface of a CPHead."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_ppd.heads.calibration.acceptance import (
    Texts,
    acceptance,
    ahead,
    logits_at,
    replay,
)
from vllm_ppd.heads.calibration.run import Calibration, parts_by_vocabulary
from vllm_ppd.heads.cp.config import CPParts
from vllm_ppd.heads.cp.module import CPHead, mixtures
from vllm_ppd.heads.module import columns
from vllm_ppd.heads.planning import ByDrafts
from vllm_ppd.heads.text import table
from vllm_ppd.kernels.unembedding_loss import rows_a_chunk

# Makes a head from its configuration and its tensors
MakeHead = Callable[[Any, dict[str, Tensor]], Any]


@torch.no_grad()
def by_drafts(
    calibration: Calibration,
    texts: Texts,
    token_ids: Tensor | None,
    make: MakeHead,
) -> ByDrafts:
    """An engine's expected counts on texts with 1, 2, ... drafts.

    Args:
        calibration: has the target, and the head's configuration and tensors.
        texts: of the target.
        token_ids: [tokens] the draft vocabulary (None: the whole).
        make: makes the head.
    """
    target = calibration.target
    head = make(calibration.config, calibration.tensors).to(
        target.device, target.dtype
    )
    head.eval()
    head.cap = target.cap
    drafts = head.positions - 1
    steps = texts.generated.shape[1]
    temperature = texts.temperature
    ids = torch.arange(target.vocab_size) if token_ids is None else token_ids
    ids = ids.to(target.device)
    index_of = columns(ids, target.vocab_size)
    size = rows_a_chunk(target.unembedding) // (head.factors * head.rank + 2)
    chances = []
    for some, windows in texts.batches(calibration.options.batch_size):
        with calibration.autocast():
            states = target.run(windows, head.layers)
            hidden = texts.reading(head.read(states), windows)
        final = texts.reading(states.final, windows)
        tokens = ahead(texts.generated[some], range(drafts + 1)).flatten(0, 1)
        # The rows of `final` that read the drafts' positions.
        places = torch.arange(len(final), device=final.device).view(-1, steps)
        places = ahead(places, range(1, drafts + 1)).flatten(0, 1)
        for rows in torch.arange(len(final)).split(max(1, size)):
            following = tokens[rows]
            context = head.context(target, following[:, :-1])
            with calibration.autocast():
                logits = head.logits(
                    hidden[rows], target.unembedding, target.bias, context
                )
                weights = head.log_weights(hidden[rows], context)
            log_qs = mixtures(
                logits[..., ids],
                weights,
                index_of[following],
            )
            by_draft = []
            for draft, log_q in enumerate(log_qs.unbind(1)):
                states_there = final[places[rows, draft]]
                log_p = logits_at(target, states_there, temperature).log_softmax(
                    -1
                )
                log_q = (log_q / (temperature or 1.0)).log_softmax(-1)
                outside = torch.full_like(log_p, -torch.inf)
                whole = outside.index_copy(
                    1,
                    ids,
                    log_q.to(log_p.dtype),
                )
                text = following[:, draft + 1]
                by_draft.append(acceptance(log_p, whole, text, temperature))
            chances.append(torch.stack(by_draft, dim=1).cpu())
    accept = torch.cat(chances).view(
        -1,
        steps,
        drafts,
    )
    lengths = texts.lengths.cpu()
    counts = [
        replay(accept[:, :, :n], lengths)
        for n in range(1, calibration.most_drafts(drafts) + 1)
    ]
    return ByDrafts(by_drafts=counts)


PARTS = parts_by_vocabulary(partial(by_drafts, make=CPHead))


def tables(parts: CPParts) -> Iterator[str]:
    """Markdown of what was measured."""
    yield "Expected drafts accepted per step (rate: accepted / drafted)"
    yield table(
        ["texts", "drafts", "rate", "accepted per step"],
        [
            [name, drafts, f"{counts.rate:.2%}", f"{counts.length - 1:.3f}"]
            for name, by in parts.by_name().items()
            for drafts, counts in enumerate(by.by_drafts, start=1)
        ],
    )
