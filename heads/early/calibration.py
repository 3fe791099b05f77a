# SPDX-License-Identifier: Apache-2.0
"""Match rates p(layer, k) of early heads (PPD, Table 2), and expected acceptance by exit."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_ppd.heads.calibration.acceptance import (
    Texts,
    acceptance,
    ahead,
    logits_at,
    replay,
)
from vllm_ppd.heads.calibration.run import Calibration
from vllm_ppd.heads.early.config import TRAINED, ByLayer, EarlyParts, Matches
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.text import table
from vllm_ppd.kernels.unembedding_loss import rows_a_chunk

KS = (1, 3, 5)  # candidates of a worker group
DRAFTS = 5  # that are measured by default


class Exits(NamedTuple):
    """What exits with heads read at every generated token."""

    layers: tuple[int, ...]
    # [layers, texts, steps] tokens that are likelier than the text's
    ranks: Tensor
    # [layers, texts, steps] P(a draft of the text's token is accepted)
    accept: Tensor
    lengths: Tensor  # [texts]

    def drafted(self, drafts: int) -> ByLayer:
        """An engine's expected counts on these texts with 1, 2, ... drafts at each exit."""
        counts = {}
        for layer, accept in zip(self.layers, self.accept, strict=True):
            ahead_of = ahead(accept, range(1, drafts + 1))
            counts[layer] = [
                replay(ahead_of[..., :n], self.lengths)
                for n in range(1, drafts + 1)
            ]
        return counts


@torch.no_grad()
def read_exits(
    calibration: Calibration, texts: Texts, token_ids: Tensor | None = None
) -> Exits:
    """Read every exit that has a head at every generated token.

    Args:
        calibration: has the target, and the heads' configuration and tensors.
        texts: of the target.
        token_ids: [tokens] the draft vocabulary (None: the whole).
    """
    target = calibration.target
    temperature = texts.temperature
    heads = EarlyHeads(calibration.config, calibration.tensors)
    heads.to(target.device, target.dtype)
    layers = heads.exit_layers
    size = rows_a_chunk(target.unembedding)
    measured: list[Tensor] = []  # [layers, 2, rows], ranks and chances
    for some, windows in texts.batches(calibration.options.batch_size):
        with calibration.autocast():
            states = target.run(windows, layers)
        final = texts.reading(states.final, windows)
        exits = {
            layer: texts.reading(states.exits[layer], windows) for layer in layers
        }
        tokens = texts.generated[some].flatten()
        for rows in torch.arange(len(tokens)).split(size):
            wanted = tokens[rows]
            log_p = logits_at(target, final[rows], temperature).log_softmax(-1)
            by_layer = []
            for layer, hidden in exits.items():
                with calibration.autocast():
                    read = heads(hidden[rows], layer)
                if heads.form == "classifier":  # it gives logits already
                    logits = read.float() / (temperature or 1.0)
                else:
                    logits = logits_at(target, read, temperature)
                if token_ids is not None:
                    within = logits[:, token_ids]
                    logits = torch.full_like(logits, -torch.inf)
                    logits = logits.index_copy(1, token_ids, within)
                rank = (logits > logits.gather(1, wanted[:, None])).sum(1)
                chance = acceptance(
                    log_p, logits.log_softmax(-1), wanted, temperature
                )
                by_layer.append(torch.stack([rank.float(), chance]).cpu())
            measured.append(torch.stack(by_layer))
    ranks, accept = torch.cat(measured, dim=-1).unbind(1)
    shape = (len(layers), *texts.generated.shape)
    return Exits(
        layers, ranks.view(shape), accept.view(shape), texts.lengths.cpu()
    )


def matches(calibration: Calibration) -> Matches:
    """p(layer, k) on greedy texts; expected acceptance on greedy and sampled texts."""
    drafts = calibration.options.num_speculative_tokens or DRAFTS
    measured = {
        name: read_exits(calibration, texts)
        for name, texts in calibration.texts()
    }
    vocabulary = {}
    token_ids = calibration.draft_vocabulary()
    if token_ids is not None:
        exits = read_exits(calibration, calibration.sampled, token_ids)
        vocabulary[len(token_ids)] = exits.drafted(drafts)
    greedy = measured["greedy"]
    steps = torch.arange(greedy.ranks.shape[2])
    ranks = greedy.ranks[:, steps < greedy.lengths[:, None]]
    rates = {}
    for k in KS:
        matched = (ranks < k).double().mean(dim=1)
        rates[k] = {TRAINED: [round(rate, 4) for rate in matched.tolist()]}
    return Matches(
        layers=list(greedy.layers),
        match=rates,
        acceptance={
            name: {TRAINED: exits.drafted(drafts)}
            for name, exits in measured.items()
        },
        vocabulary=vocabulary,
    )


PARTS = {"timing": Calibration.timing, "matches": matches}


def tables(parts: EarlyParts) -> Iterator[str]:
    """Markdown of what was measured."""
    measured = parts.matches
    yield "Match rate by exit layer, greedy texts (PPD, Table 2)"
    rows = []
    for k, rates in measured.match.items():
        rows.append([k, *(f"{rate:.2%}" for rate in rates[TRAINED])])
    yield table(["k", *measured.layers], rows)
    by_name = {
        f"{name} texts": by_form[TRAINED]
        for name, by_form in measured.acceptance.items()
    }
    for size, by_layer in measured.vocabulary.items():
        by_name[f"sampled texts, from {size} tokens"] = by_layer
    for name, by_layer in by_name.items():
        yield f"Expected tokens per step by drafts n, {name}"
        lines = [
            [layer, *(f"{counts.length:.3f}" for counts in by_drafts)]
            for layer, by_drafts in by_layer.items()
        ]
        drafts = [f"n={n}" for n in range(1, len(lines[0]))]
        yield table(["exit", *drafts], lines)
