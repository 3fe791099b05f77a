# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: the tokens that followed the longest earlier match of a text's end
(https://github.com/apoorvumang/prompt-lookup-decoding).

Of several longest matches the latest counts. A match of which fewer tokens follow than
are drafted repeats: the text is taken as periodic from there on.

Beside a method that drafts, each kind of match has a counter that chooses between the
two, as a tournament of branch predictors does (McFarling, "Combining Branch
Predictors", 1993): `judge`.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Texts(NamedTuple):
    """The tokens of all requests."""

    token_ids: Tensor  # [request rows, max length] int32
    lengths: Tensor  # [request rows] int32


def look_up(
    texts: Texts,
    rows: Tensor,  # [requests] int64, request rows; -1 for padding
    shortest: int,
    longest: int,
    window: int,
    matched: Tensor,  # [requests] int32, written
    drafts: Tensor,  # [requests, K] int64, written
) -> None:
    """Look drafts up.

    Args:
        texts: of all requests.
        rows: whose drafts are looked up.
        shortest, longest: least and most tokens that are compared.
        window: latest tokens of a text that are searched.
        matched: tokens that agree; 0 for no match, whose drafts are arbitrary.
        drafts: tokens that followed.
    """
    places = np.arange(drafts.shape[1])
    for request, row in enumerate(rows.tolist()):
        matched[request] = 0
        if row < 0:
            continue
        length = int(texts.lengths[row])
        text = texts.token_ids[row, max(length - window, 0) : length].numpy()
        agreeing, end = longest_match(text, longest)
        if agreeing >= shortest:
            matched[request] = agreeing
            distance = len(text) - 1 - end
            drafts[request] = torch.from_numpy(text[end + 1 + places % distance])


def judge(
    texts: Texts,
    rows: Tensor,  # [requests] int64, request rows; -1 for padding
    drafts: Tensor,  # [requests, 1 + 2 K] int64
    began: Tensor,  # [request rows + 1] int32, written
    trials: Tensor,  # [request rows + 1, 1 + 2 K] int64, written
    gains: Tensor,  # [kinds] int32, written
) -> None:
    """Compare drafts with what the texts became, and note new ones for later.

    Both sources are compared with the same tokens, whichever was verified. So no
    exploration is needed.

    Args:
        texts: of all requests.
        rows: of the drafts.
        drafts: the kind of match, below 2 for none, the drafts from the text, and the
            method's.
        began: length of a row's text when its trial began; 0 for no trial. A trial ends
            when K more tokens are known.
        trials: such drafts on trial.
        gains: for each kind, right drafts from texts less right drafts of the method.
    """
    used = rows >= 0
    rows = rows[used]
    lengths = texts.lengths[rows]
    start = began[rows]
    places = torch.arange(drafts.shape[1] // 2, device=rows.device)
    ended = (start > 0) & (lengths - start >= len(places))
    wanted = (start * ended)[:, None] + places
    tokens = texts.token_ids[rows[:, None], wanted]
    trial = trials[rows]
    right = trial[:, 1:].unflatten(1, (2, -1)) == tokens[:, None]
    accepted = right.cumprod(dim=2).sum(dim=2)
    gained = (accepted[:, 0] - accepted[:, 1]) * ended
    gains.index_add_(0, trial[:, 0], gained.int())

    free = ended | (start == 0)
    rows = rows[free]
    drafts = drafts[used][free]
    began[rows] = torch.where(drafts[:, 0] > 1, lengths[free], 0)
    trials[rows] = drafts


def longest_match(text: np.ndarray, longest: int) -> tuple[int, int]:
    """(Tokens that agree, index of the last of them) of the longest, then latest match
    of a text's end; (0, 0): none.
    """
    last = len(text) - 1
    ends = np.flatnonzero(text[:last] == text[last])
    agreeing = 0
    found = 0
    while len(ends):
        agreeing += 1
        found = int(ends[-1])
        if agreeing == longest:
            break
        ends = ends[ends >= agreeing]
        ends = ends[text[ends - agreeing] == text[last - agreeing]]
    return agreeing, found
