# SPDX-License-Identifier: Apache-2.0
"""Expected acceptance of DynaMo heads in verified mode, by back-off threshold and drafts."""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from vllm_ppd.heads.calibration.acceptance import Texts, ahead, logits_at, replay
from vllm_ppd.heads.calibration.run import Calibration, parts_by_vocabulary
from vllm_ppd.heads.dynamo.config import DynaMoParts, Row, Rows
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.joint import candidates
from vllm_ppd.heads.dynamo.mask import LearnedMask
from vllm_ppd.heads.dynamo.recipe import DynaMoHeads, new_layers
from vllm_ppd.heads.text import table
from vllm_ppd.heads.training.tokens import Batch

JOINT_ELEMENTS = 1 << 23  # most entries of joints in memory
Key = tuple[float, int]  # back-off threshold, most drafts


@torch.no_grad()
def drafted(
    calibration: Calibration, texts: Texts, token_ids: Tensor | None
) -> Rows:
    """An engine's expected counts on texts, by back-off threshold and most drafts.

    Greedy texts: the joint's best n-gram is drafted, and accepted as far as it is the
    text. Sampled texts: n-grams are drawn from the joint, and a token of the text was
    accepted with probability min(1, q/p), which is a little more than draws that share
    their noise with the target.

    Args:
        calibration: has the target, and the heads' configuration and tensors.
        texts: of the target.
        token_ids: [tokens] the draft vocabulary (None: the whole).
    """
    target = calibration.target
    temperature = texts.temperature
    k = calibration.config.sampling.k
    heads = DynaMoHeads(new_layers(target, calibration.config.tokens))
    tensors = calibration.tensors
    heads.load_state_dict({name: tensors[name] for name in heads.state_dict()})
    heads.to(target.device, target.dtype).eval()
    seen = CoOccurrence.from_tensors(tensors)
    ngrams = None if seen is None else seen.ngrams.to(target.device)
    ids = torch.arange(target.vocab_size, device=target.device)
    if token_ids is not None:
        ids = token_ids
    mask = LearnedMask(tensors).to(target.device, target.dtype)
    heat = torch.tensor(temperature or 1.0, device=target.device)
    tables = mask.tables(
        ids,
        target.embed,
        lambda states: functional.linear(states, target.unembedding[ids]),
    )
    steps = texts.generated.shape[1]
    drafts = heads.tokens - 1
    size = max(1, JOINT_ELEMENTS // k**drafts)
    eps_b = calibration.options.eps_b
    keys = [
        (eps, most)
        for eps in eps_b
        for most in range(1, calibration.most_drafts(drafts) + 1)
    ]
    chances: dict[Key, list[Tensor]] = defaultdict(list)
    limits: dict[Key, list[Tensor]] = defaultdict(list)
    for some, windows in texts.batches(calibration.options.batch_size):
        generated = texts.generated[some]
        final, *states = (
            texts.reading(s, windows)
            for s in head_states(calibration, heads, windows)
        )
        log_p = []
        flat = zip(
            final.split(size), generated.flatten().split(size), strict=True
        )
        for rows, token in flat:
            log_probs = logits_at(target, rows, temperature).log_softmax(-1)
            log_p.append(log_probs.gather(1, token[:, None]))
        tokens = ahead(generated, range(drafts + 1), fill=-2).flatten(0, 1)
        targets = torch.cat(log_p).view_as(generated)
        targets = ahead(targets, range(1, drafts + 1)).flatten(0, 1)
        for rows in torch.arange(len(tokens)).split(size):
            first = tokens[rows, 0]
            read = torch.stack([state[rows] for state in states])
            masked = mask.masked(read, target.embed(first))
            factors = logits_at(target, masked, 0.0)[..., ids]
            joint = candidates(
                factors, k, ngrams, first, token_ids, tables=tables, heat=heat
            )
            for key in keys:
                eps, most = key
                threshold = torch.full_like(first, eps, dtype=torch.float32)
                choice = joint.back_off(threshold, most + 1)
                text = tokens[rows, : most + 1]
                if temperature:
                    ratio = (
                        choice.probabilities(text).log() - targets[rows, :most]
                    )
                    chance = ratio.exp().clamp(max=1)
                else:
                    chance = (choice.likeliest.tokens == text)[:, 1:].float()
                chances[key].append(chance.cpu())
                limits[key].append((choice.order - 1).cpu())
    lengths = texts.lengths.cpu()
    measured = []
    for key in keys:
        eps, most = key
        accept = torch.cat(chances[key]).view(-1, steps, most)
        limit = torch.cat(limits[key]).view(-1, steps)
        counts = replay(accept, lengths, limit).model_dump()
        measured.append(Row(eps_b=eps, drafts_allowed=most, **counts))
    return Rows(rows=measured)


def head_states(
    calibration: Calibration, heads: DynaMoHeads, batch: Batch
) -> list[Tensor]:
    """The states that the LM head reads for each head, the target's first: [tokens,
    hidden] each.
    """
    target = calibration.target
    with calibration.autocast():
        run = target.run(batch, stem=True)
        assert run.stem is not None
        args, kwargs = run.stem
        others = [
            target.norm(heads(token, args, kwargs)).flatten(0, 1)
            for token in range(2, heads.tokens + 1)
        ]
    return [run.final, *others]


PARTS = parts_by_vocabulary(drafted)


def tables(parts: DynaMoParts) -> Iterator[str]:
    """Markdown of what was measured."""
    yield "Verified mode: expected drafts accepted per step (rate: accepted / drafted)"
    lines = []
    for name, by in parts.by_name().items():
        for row in by.rows:
            drafted = row.drafted / max(row.cycles, 1)
            accepted = row.accepted / max(row.cycles, 1)
            figures = (f"{row.rate:.2%}", f"{drafted:.3f}", f"{accepted:.3f}")
            lines.append([name, row.eps_b, row.drafts_allowed, *figures])
    header = ["texts", "eps_b", "most drafts", "rate", "drafted", "accepted"]
    yield table(header, lines)
