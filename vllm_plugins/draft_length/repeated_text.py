# SPDX-License-Identifier: Apache-2.0
"""Which requests can look drafts up, decided by the scheduler from their texts, as it
has no drafts of runner V2.
"""

from collections.abc import Collection, Sequence


class RepeatedText:
    """Tells whether each request's last tokens occurred before in its text; a call
    takes time for new tokens only.

    Args:
        shortest: tokens that must agree.
    """

    def __init__(self, shortest: int) -> None:
        self.shortest = shortest
        self._seen: dict[str, set[tuple[int, ...]]] = {}  # n-grams of each text
        self._lengths: dict[str, int] = {}
        self._repeats: dict[str, bool] = {}

    def extend(self, req_id: str, token_ids: Sequence[int]) -> None:
        """Take a request's current text, which begins with the one of the last call."""
        if len(token_ids) <= self._lengths.get(req_id, 0):
            return
        seen = self._seen.setdefault(req_id, set())
        new = token_ids[max(self._lengths.get(req_id, 0) + 1 - self.shortest, 0) :]
        self._lengths[req_id] = len(token_ids)
        *grams, last = list(
            zip(*(new[offset:] for offset in range(self.shortest)), strict=False)
        ) or [()]
        seen.update(grams)
        self._repeats[req_id] = last in seen
        if last:
            seen.add(last)

    def forget_others(self, req_ids: Collection[str]) -> None:
        """Forget all requests but these."""
        for req_id in [req_id for req_id in self._seen if req_id not in req_ids]:
            del self._seen[req_id], self._lengths[req_id], self._repeats[req_id]

    def repeats(self, req_ids: Sequence[str]) -> list[bool]:
        """Whether each request's last tokens occurred before."""
        return [self._repeats.get(req_id, False) for req_id in req_ids]
