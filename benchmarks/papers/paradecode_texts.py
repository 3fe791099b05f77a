# SPDX-License-Identifier: Apache-2.0
"""ParaDecode without engines: how sure and how right an exit is, and the text of unverified early predictions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vllm_ppd.heads.calibration.run import Calibration
from vllm_ppd.heads.calibration.text import Texts, logits_at
from vllm_ppd.heads.early.module import EarlyHeads


class Predictions(NamedTuple):
    """Early predictions at every generated token of texts, a flat row of tokens each."""

    confidence: torch.Tensor  # [tokens] p of the exit's best token
    right: torch.Tensor  # [tokens] whether the target chose it, too

    def rates(self, gamma: float) -> tuple[float, float | None]:
        """Early prediction rate, and the share of these that verification rejects (None: there are none)."""
        early = self.confidence > gamma
        rejected = 1 - float(self.right[early].double().mean()) if bool(early.any()) else None
        return float(early.double().mean()), rejected


@torch.no_grad()
def predictions(calibration: Calibration, heads: EarlyHeads, texts: Texts, layer: int) -> Predictions:
    """Read one exit at every token of greedy texts."""
    confidence, right = [], []
    for part, windows in texts.batches(calibration.options.batch):
        with calibration.autocast():
            states = calibration.target.run(windows, (layer,))
        valid = texts.valid()[part].flatten()
        hidden = texts.reading(states.exits[layer], windows)[valid]
        best = exit_logits(calibration, heads, hidden, layer).softmax(-1).max(-1)
        confidence.append(best.values.cpu())
        right.append((best.indices == texts.generated[part].flatten()[valid]).cpu())
    return Predictions(torch.cat(confidence), torch.cat(right))


def exit_logits(calibration: Calibration, heads: EarlyHeads, hidden: torch.Tensor, layer: int) -> torch.Tensor:
    """What the head at an exit says of normed states [rows, hidden]: [rows, vocabulary]."""
    with calibration.autocast():
        read = heads(hidden, layer)
    return read.float() if heads.form == "classifier" else logits_at(calibration.target, read, 0.0)


@torch.no_grad()
def unverified(calibration: Calibration, heads: EarlyHeads, texts: Texts, layer: int) -> float:
    """Share of tokens equal to the texts' where each next token is the exit's best one and nothing verifies it."""
    target = calibration.target
    same = total = 0
    caught: list[torch.Tensor] = []

    def catch(_: Any, __: Any, output: Any) -> None:
        caught.append(output[0] if isinstance(output, tuple) else output)

    hook = target.layers[layer - 1].register_forward_hook(catch)
    try:
        for start in range(0, len(texts.ids), calibration.options.batch):
            part = slice(start, start + calibration.options.batch)
            tokens, cache, said = texts.ids[part, : texts.prompt], None, []
            starts = torch.zeros(1, dtype=torch.int64) if texts.starts is None else texts.starts[part]
            place = torch.arange(texts.ids.shape[1], device=tokens.device) - starts.to(tokens.device)[:, None]
            place = place.expand(len(tokens), -1)
            end = 0
            for _ in range(texts.generated.shape[1]):
                begin, end = end, end + tokens.shape[1]
                with calibration.autocast():
                    output = target.base(
                        input_ids=tokens, past_key_values=cache, use_cache=True,
                        attention_mask=(place[:, :end] >= 0).long(), position_ids=place[:, begin:end].clamp(min=0),
                    )  # fmt: skip
                    hidden = target.norm(caught.pop()[:, -1])
                cache = output.past_key_values
                tokens = exit_logits(calibration, heads, hidden, layer).argmax(-1, keepdim=True)
                said.append(tokens)
            valid = texts.valid()[part]
            same += int(((torch.cat(said, dim=1) == texts.generated[part]) & valid).sum())
            total += int(valid.sum())
    finally:
        hook.remove()
    return same / max(total, 1)
