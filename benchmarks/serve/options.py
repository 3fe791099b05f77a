# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd bench serve`, declared once."""

import math
from typing import Annotated, Any, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from vllm_ppd.benchmarks.harness.options import NONE, PLAIN, BenchOptions, Plain
from vllm_ppd.heads.comma_lists import COMMAS
from vllm_ppd.vllm_plugins.platform import kv_cache

SHORTEST = 8  # tokens of an answer


class Load(NamedTuple):
    """How requests arrive: at random with a mean rate, or as fast as a limit of concurrent requests allows."""

    rate: float | None  # requests per second (None: all at the start)
    concurrency: int | None  # requests at once, while others wait at the client (None: no limit)

    def __str__(self) -> str:
        return "all at once" if self == (None, None) else (
            f"{self.rate:g} per second" if self.rate is not None else f"{self.concurrency} at once"
        )  # fmt: skip


class ServeOptions(BenchOptions):
    """Options for servers under a stream of requests."""

    benchmark = "serve"
    apart = BenchOptions.apart | {"rates", "concurrencies"}

    plain: Annotated[tuple[Plain, ...], COMMAS, NONE] = Field(("ppd",), description=PLAIN)
    rates: Annotated[tuple[PositiveFloat, ...], COMMAS, NONE] = Field(
        (1.0, 2.0, 4.0, math.inf),
        description="requests per second, each a load (Poisson arrivals; inf: all at once); 'none' omits these loads",
    )
    concurrencies: Annotated[tuple[PositiveInt, ...], COMMAS, NONE] = Field(
        (1, 4, 16), description="concurrent requests, each a load; the next is sent when one ends; 'none' omits these"
    )
    requests: int = Field(32, ge=2, description="requests per turn")
    context: int = Field(
        1024, ge=64, description="most tokens of a request, half for the prompt and half for the answer"
    )
    new_tokens: int = Field(
        128, ge=SHORTEST, description="median number of tokens that a request generates (log-normal)"
    )
    new_spread: float = Field(0.8, ge=0, description="standard deviation of the logarithm of the tokens generated")
    dataset: str | None = Field(
        None, description="let `vllm bench serve` read --data itself, as its --dataset-name (spec_bench, sharegpt, "
        "custom, ...), with answers of --new-tokens (default: read it as other commands do)"
    )  # fmt: skip
    out: str = Field("serve.json", description="file of results; a run adds to its results")

    @field_validator("concurrencies")
    @classmethod
    def _some_load(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if not value and not info.data.get("rates"):
            raise ValueError("no load is left; give --rates or --concurrencies")
        return value

    @field_validator("dataset")
    @classmethod
    def _a_single_file(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and len(info.data.get("data", ())) > 1:
            raise ValueError("vLLM reads a single file or folder; give a single --data, or leave --dataset out")
        return value

    @property
    def files(self) -> tuple[str, ...]:
        """The data files, unless `vllm bench serve` reads them."""
        return self.data if self.dataset is None else ()

    @property
    def loads(self) -> list[Load]:
        """A load for each rate, without a limit on concurrency, then one for each concurrency."""
        rates = [Load(None if math.isinf(rate) else rate, None) for rate in self.rates]
        return list(dict.fromkeys(rates + [Load(None, number) for number in self.concurrencies]))

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of every contender's server in addition to the model; the rest is vLLM's default."""
        wished = {"enforce_eager": self.eager, "trust_remote_code": self.trust_remote_code}
        return {
            "dtype": self.dtype, "seed": self.seed, "max_model_len": self.context,
            "generation_config": "vllm",  # else requests get the penalties of the model's generation_config.json
            **kv_cache(self.kv_cache_gib),
            **{name: True for name, value in wished.items() if value}, **self.engine,
        }  # fmt: skip

    @property
    def tokenizer(self) -> str:
        """The model's tokenizer, unless --engine names another."""
        return str(self.engine_arguments.get("tokenizer", self.model))
