# SPDX-License-Identifier: Apache-2.0
"""What the V2 tests share: the methods on the demo model, and an engine's view that keeps cases small."""

from copy import copy
from typing import Any

from conftest import DEMO

HEADS = DEMO.parent / "heads"
METHODS: dict[str, dict[str, Any]] = {
    "cp": {"method": "cp", "model": str(HEADS / "cp")},
    "early": {"method": "ppd", "model": str(HEADS / "early"), "exit_layer": 6, "num_speculative_tokens": 3},
    "dynamo": {"method": "dynamo", "model": str(HEADS / "dynamo"), "eps_b": 0.05},
}


class Small:
    """An engine that takes the first requests of a call alone, and fewer tokens of each: a step here is slow."""

    def __init__(self, llm: Any, requests: int = 3, tokens: int = 16) -> None:
        self._llm, self.requests, self.tokens = llm, requests, tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, prompts: list[Any], params: Any, **settings: Any) -> Any:
        every = params if isinstance(params, list) else [params] * len(prompts)
        shorter = [copy(param) for param in every[: self.requests]]
        for param in shorter:
            param.max_tokens = min(param.max_tokens, self.tokens)
        return self._llm.generate(prompts[: self.requests], shorter, **settings)
