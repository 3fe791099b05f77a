# SPDX-License-Identifier: Apache-2.0
"""How many drafts the target accepts: decayed means per kind of request, and per request.

A kind holds p_i, the probability that draft i is accepted if those before it were. The
first k drafts then yield S_k = p_1 + p_1 p_2 + ... + p_1 ... p_k tokens. A request has a
factor on it: its own accepted drafts over those that its kind expects.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

# Drafts of each position that a kind remembers
MEMORY = 512.0
# Before the first draft is verified: an acceptance, and the drafts that it weighs
GUESS = 0.6
GUESS_WEIGHT = 4.0
# Steps of a request that count, and the expected drafts that its kind weighs beside them
REQUEST_MEMORY = 32.0
KIND_WEIGHT = 8.0
# Steps without drafts after which evidence weighs half, since the text may have changed
HALF_LIFE = 1024.0
# Requests are followed one by one in batches up to this size
MAX_FOLLOWED = 32


class KindAcceptance:
    """Decayed counts of the drafts of one kind.

    Args:
        max_drafts: K.
    """

    def __init__(self, max_drafts: int) -> None:
        self.trials = [GUESS_WEIGHT] * max_drafts
        self.hits = [GUESS * GUESS_WEIGHT] * max_drafts
        self.expected = self._expected()  # S_0, ..., S_K

    def count(self, drafts: int, accepted: Counter[int]) -> None:
        """Count verified drafts.

        Args:
            drafts: of each request.
            accepted: accepted drafts -> number of requests.
        """
        trials = sum(accepted.values())
        for position in range(drafts):
            if not trials:
                break
            hits = trials - accepted[position]
            kept = max(1 - trials / MEMORY, 0.5)
            self.trials[position] = self.trials[position] * kept + trials
            self.hits[position] = self.hits[position] * kept + hits
            trials = hits
        self.expected = self._expected()

    def _expected(self) -> list[float]:
        sums = [0.0]
        reached = 1.0
        for hits, trials in zip(self.hits, self.trials, strict=True):
            reached *= hits / trials
            sums.append(sums[-1] + reached)
        return sums

    def deviation(self, drafts: int, age: float) -> float:
        """Standard deviation of the estimate of S_k, to first order in each p_i.

        Args:
            drafts: k.
            age: steps since drafts were verified.
        """
        fresh = 0.5 ** (age / HALF_LIFE)
        variance = 0.0
        for position in range(drafts):
            rate = self.hits[position] / self.trials[position]
            # S_k is linear in p_i: the slope is its part from draft i on, over p_i.
            later = self.expected[drafts] - self.expected[position]
            slope = later / max(rate, 0.05)
            trials = max(self.trials[position] * fresh, 1.0)
            variance += slope**2 * max(rate * (1 - rate), 0.02) / trials
        return math.sqrt(variance)


class Acceptance:
    """Expected accepted drafts of batches.

    Verified drafts are counted when they come, and the kinds learn from them when they
    are next asked.

    Args:
        max_drafts: K.
        kinds: number of kinds.
        limits: the most drafts of requests that have such a number.
    """

    def __init__(
        self, max_drafts: int, kinds: int, limits: Mapping[str, int]
    ) -> None:
        self._limits = limits
        self.kinds = [KindAcceptance(max_drafts) for _ in range(kinds)]
        self._max_drafts = max_drafts
        # (kind, verified drafts, emitted tokens) -> requests
        self._counts: Counter[tuple[int, int, int]] = Counter()
        # request -> [accepted drafts, drafts that its kind expected]
        self._requests: dict[str, list[float]] = {}
        self.age = 0  # steps since drafts were verified

    def observe(
        self,
        req_ids: Sequence[str],
        kinds: Sequence[int],
        drafts: int,
        emitted: Sequence[int],
    ) -> None:
        """Count a step.

        Args:
            req_ids, kinds: of the requests with verified drafts.
            drafts: of each request.
            emitted: tokens of each.
        """
        self.age = 0
        verified = self._at_most(drafts, req_ids)
        self._counts.update(zip(kinds, verified, emitted, strict=True))
        if len(req_ids) > MAX_FOLLOWED:
            return
        kept = 1 - 1 / REQUEST_MEMORY
        for req_id, kind, most, tokens in zip(
            req_ids, kinds, verified, emitted, strict=True
        ):
            state = self._requests.setdefault(req_id, [0.0, 0.0])
            state[0] = state[0] * kept + tokens - 1
            state[1] = state[1] * kept + self.kinds[kind].expected[most]

    def learn(self) -> None:
        """Have the kinds learn from what was counted."""
        groups: dict[tuple[int, int], Counter[int]] = {}
        for (kind, drafts, tokens), requests in self._counts.items():
            groups.setdefault((kind, drafts), Counter())[tokens - 1] += requests
        for (kind, drafts), accepted in groups.items():
            self.kinds[kind].count(drafts, accepted)
        self._counts.clear()

    def forget_others(self, req_ids: Collection[str]) -> None:
        """Forget all requests but these, once there are many others."""
        if len(self._requests) > 2 * len(req_ids) + MAX_FOLLOWED:
            self._requests = {
                req_id: self._requests[req_id]
                for req_id in req_ids
                if req_id in self._requests
            }

    def per_request(
        self, req_ids: Sequence[str], kinds: Sequence[int]
    ) -> list[float]:
        """Mean accepted drafts a request of a batch, by the number of drafts: [1 + K]."""
        most = self._at_most(self._max_drafts, req_ids)
        groups = list(zip(kinds, most, strict=True))
        requests = Counter(groups)  # (kind, most drafts) -> requests
        weights: dict[
            tuple[int, int], float
        ] = {}  # the same, by their own factors
        if len(req_ids) > MAX_FOLLOWED:
            weights.update(requests)
        else:
            for req_id, group in zip(req_ids, groups, strict=True):
                accepted, expected = self._requests.get(req_id, (0.0, 0.0))
                factor = (accepted + KIND_WEIGHT) / (expected + KIND_WEIGHT)
                weights[group] = weights.get(group, 0.0) + factor
        sums = [0.0] * (1 + self._max_drafts)
        for group, weight in weights.items():
            kind, limit = group
            for drafts in range(1 + self._max_drafts):
                verified = min(drafts, limit)
                mean = weight * self.kinds[kind].expected[verified]
                sums[drafts] += min(mean, requests[group] * verified)
        return [total / len(req_ids) for total in sums]

    def _at_most(self, drafts: int, req_ids: Sequence[str]) -> list[int]:
        """A number of drafts of each request, or the request's limit."""
        limits = self._limits
        if not limits:
            return [drafts] * len(req_ids)
        return [min(drafts, limits.get(req_id, drafts)) for req_id in req_ids]

    def deviation(self, kinds: Collection[int], drafts: int) -> float:
        """The largest standard deviation of S_k among the kinds of a batch."""
        return max(self.kinds[kind].deviation(drafts, self.age) for kind in kinds)
