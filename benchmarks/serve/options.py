# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd bench serve`, declared once."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationInfo, field_validator

from vllm_ppd.benchmarks.harness.options import NONE, PLAIN, BenchOptions, LoopOptions, Plain
from vllm_ppd.heads.comma_lists import COMMAS
from vllm_ppd.vllm_plugins.platform import kv_cache

SHORTEST = 8  # tokens of a prompt or an answer


class Load(NamedTuple):
    """How requests come: at random with a mean rate, or as fast as so many at once allow."""

    rate: float | None  # requests a second (None: all are there at the start)
    concurrency: int | None  # requests at once, the others wait at the client (None: any number)

    def __str__(self) -> str:
        return "all at once" if self == (None, None) else (
            f"{self.rate:g} a second" if self.rate is not None else f"{self.concurrency} at once"
        )  # fmt: skip


class ServeOptions(BenchOptions):
    """Servers under requests that come one by one."""

    benchmark = "serve"
    apart = BenchOptions.apart | {"rates", "concurrencies"}

    plain: Annotated[tuple[Plain, ...], COMMAS, NONE] = Field(("ppd",), description=PLAIN)
    tokenizer: str | None = Field(None, description="folder of the tokenizer (none: the model's)")
    rates: Annotated[tuple[float, ...], COMMAS, NONE] = Field(
        (1.0, 2.0, 4.0, math.inf),
        description="requests a second, a load each (Poisson arrivals; inf: all at once); 'none' leaves them out",
    )
    concurrencies: Annotated[tuple[int, ...], COMMAS, NONE] = Field(
        (1, 4, 16), description="requests at once, a load each: the next is sent when one ends; 'none' leaves them out"
    )
    requests: int = Field(32, ge=2, description="requests of a turn")
    chats: bool = Field(
        False, description="prompts are what the data's records ask (chats through the model's chat template up to the "
        "user's last turn, prompts, token ids), rather than pieces of its text"
    )  # fmt: skip
    prompt_tokens: int = Field(96, ge=SHORTEST, description="median of a prompt's tokens, whose lengths are log-normal")
    prompt_spread: float = Field(1.0, ge=0, description="standard deviation of the logarithm of a prompt's tokens")
    new_tokens: int = Field(
        128, ge=SHORTEST, description="median of the tokens that a request generates, log-normal, too"
    )
    new_spread: float = Field(0.8, ge=0, description="standard deviation of the logarithm of the tokens generated")
    context: int = Field(1024, ge=64, le=2048, description="most tokens of a request, half of them for the prompt and "
                         "half for the answer")  # fmt: skip
    shared: float = Field(0.5, ge=0, le=1, description="share of the requests whose prompts begin alike, as a system "
                          "prompt makes them")  # fmt: skip
    shared_tokens: int = Field(
        256, ge=1, validate_default=True, description="tokens that these begin with, other ones in each round"
    )
    out: str = Field("serve.json", description="results; a run adds to those that are there")

    @field_validator("rates", "concurrencies")
    @classmethod
    def _positive(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(not part > 0 for part in value):
            raise ValueError("must be above 0")
        return value

    @field_validator("concurrencies")
    @classmethod
    def _some_load(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if not value and not info.data.get("rates"):
            raise ValueError("no load is left; give --rates or --concurrencies")
        return value

    @field_validator("shared_tokens")
    @classmethod
    def _room(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("shared") and value > info.data.get("context", 0) // 2 - SHORTEST:
            raise ValueError("leaves no room for the rest of a prompt; give fewer, or a larger --context")
        return value

    @property
    def loads(self) -> list[Load]:
        """Each rate, without a limit of requests at once; then each number at once."""
        rates = [Load(None if math.isinf(rate) else rate, None) for rate in self.rates]
        return list(dict.fromkeys(rates + [Load(None, number) for number in self.concurrencies]))

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """What every contender's server is started with, beside the model; the rest is vLLM's own choice."""
        wished = {"enforce_eager": self.eager, "trust_remote_code": self.trust_remote_code}
        return {
            "dtype": self.dtype, "seed": self.seed, "max_model_len": self.context,
            "tokenizer": self.tokenizer or self.model,
            "generation_config": "vllm",  # else requests get the penalties of the model's generation_config.json
            **kv_cache(self.kv_cache_gib),
            **{name: True for name, value in wished.items() if value}, **json.loads(self.engine),
        }  # fmt: skip


class OpenLoopOptions(LoopOptions, ServeOptions):
    """Requests that arrive at engines of one process, each with a clock of its own."""

    benchmark = "open_loop"

    concurrencies: tuple[int, ...] = ()
    requests: int = Field(48, ge=2, description="requests of a round")
    rounds: int = Field(2, ge=1, description="rounds at each rate, each begun by another engine")
    new_tokens: int = Field(64, ge=SHORTEST, description="median of the tokens that a request generates")
    most: int = Field(32, ge=1, description="requests that an engine decodes at once")
    warm_up: int = Field(16, ge=1, description="requests of each engine before the first round at a rate")
    out: str = Field("open_loop.json", description="results; a run adds to those that are there")
