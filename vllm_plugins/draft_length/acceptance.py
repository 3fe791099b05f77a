# SPDX-License-Identifier: Apache-2.0
"""How many drafts the target accepts: decayed means per exit and kind of request, and
per request.

A kind holds p_i, the probability that draft i is accepted if those before it were. The
first k drafts then yield S_k = p_1 + p_1 p_2 + ... + p_1 ... p_k tokens. A request has a
factor on it, at any exit: its own accepted drafts over those that its kind expects.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence

from vllm_ppd.vllm_plugins.draft_length.costs import Plan

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

    Args:
        max_drafts: K.
        kinds: number of kinds.
        exits: number of exit layers.
    """

    def __init__(self, max_drafts: int, kinds: int, exits: int = 1) -> None:
        # [exits][kinds]
        self.exits = [
            [KindAcceptance(max_drafts) for _ in range(kinds)]
            for _ in range(exits)
        ]
        # request -> [accepted drafts, drafts that its kind expected]
        self._requests: dict[str, list[float]] = {}
        self._ages = [0] * exits  # steps since drafts of each exit were verified

    def observe(
        self,
        req_ids: Sequence[str],
        kinds: Sequence[int],
        plan: Plan,
        emitted: Sequence[int],
    ) -> None:
        """Count a step.

        Args:
            req_ids, kinds: of the requests with verified drafts.
            plan: of these drafts.
            emitted: tokens of each.
        """
        self.grow_old()
        self._ages[plan.exit] = 0
        of_kinds = self.exits[plan.exit]
        counts: dict[int, Counter[int]] = {}
        pairs = Counter(zip(kinds, emitted, strict=True))
        for (kind, tokens), requests in pairs.items():
            counts.setdefault(kind, Counter())[tokens - 1] += requests
        if len(req_ids) <= MAX_FOLLOWED:
            kept = 1 - 1 / REQUEST_MEMORY
            for req_id, kind, tokens in zip(req_ids, kinds, emitted, strict=True):
                state = self._requests.setdefault(req_id, [0.0, 0.0])
                state[0] = state[0] * kept + tokens - 1
                state[1] = state[1] * kept + of_kinds[kind].expected[plan.drafts]
        for kind, accepted in counts.items():
            of_kinds[kind].count(plan.drafts, accepted)

    def grow_old(self) -> None:
        """Note a step."""
        self._ages = [age + 1 for age in self._ages]

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
    ) -> list[list[float]]:
        """Mean accepted drafts a request of a batch, by exit and number of drafts:
        [exits][1 + K].
        """
        shares = [0.0] * len(self.exits[0])
        if len(req_ids) <= MAX_FOLLOWED:
            for req_id, kind in zip(req_ids, kinds, strict=True):
                accepted, expected = self._requests.get(req_id, (0.0, 0.0))
                factor = (accepted + KIND_WEIGHT) / (expected + KIND_WEIGHT)
                shares[kind] += factor / len(req_ids)
        else:
            for kind, requests in Counter(kinds).items():
                shares[kind] = requests / len(req_ids)
        accepted = []
        for of_kinds in self.exits:
            by_drafts = zip(*(kind.expected for kind in of_kinds), strict=True)
            means = [
                min(sum(map(float.__mul__, shares, expected)), float(drafts))
                for drafts, expected in enumerate(by_drafts)
            ]
            accepted.append(means)
        return accepted

    def deviation(self, kinds: Collection[int], plan: Plan) -> float:
        """The largest standard deviation of S_k among the kinds of a batch."""
        of_kinds = self.exits[plan.exit]
        age = self._ages[plan.exit]
        return max(of_kinds[kind].deviation(plan.drafts, age) for kind in kinds)
