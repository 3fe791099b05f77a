# SPDX-License-Identifier: Apache-2.0
"""Which requests can look drafts up, as the scheduler sees it: it has their texts, and no drafts of runner V2."""

from collections.abc import Collection, Sequence


class RepeatedText:
    """Whether each request's last tokens have stood before in its text; a call takes the time of its new tokens.

    Args:
        shortest: tokens that must agree.
    """

    def __init__(self, shortest: int) -> None:
        self.shortest = shortest
        self._seen: dict[str, set[tuple[int, ...]]] = {}  # n-grams of each text
        self._lengths: dict[str, int] = {}
        self._repeats: dict[str, bool] = {}

    def extend(self, req_id: str, token_ids: Sequence[int]) -> None:
        """Take a request's text, which is the last one and what followed it."""
        if len(token_ids) <= self._lengths.get(req_id, 0):
            return
        seen = self._seen.setdefault(req_id, set())
        new = token_ids[max(self._lengths.get(req_id, 0) + 1 - self.shortest, 0) :]
        self._lengths[req_id] = len(token_ids)
        *grams, last = list(zip(*(new[offset:] for offset in range(self.shortest)), strict=False)) or [()]
        seen.update(grams)
        self._repeats[req_id] = last in seen
        if last:
            seen.add(last)

    def forget_others(self, req_ids: Collection[str]) -> None:
        """Forget requests that have ended; these have not."""
        if len(self._seen) > len(req_ids):
            for req_id in self._seen.keys() - set(req_ids):
                del self._seen[req_id], self._lengths[req_id], self._repeats[req_id]

    def repeats(self, req_ids: Sequence[str]) -> list[bool]:
        """Whether each request's last tokens have stood before."""
        return [self._repeats.get(req_id, False) for req_id in req_ids]
