# SPDX-License-Identifier: Apache-2.0
"""Quantized targets: greedy output is the quantized target's own, and drafts are
accepted, with every method.

Which kernels vLLM takes depends on the processor. Where they take float32, tokens are
the same; where they take 16-bit activations alone, a few rows may round differently
from many, and each token must be the target's best or all but that. Formats that end in
`-amx` run the kernel of 8 bits that vLLM takes where there is AMX; AVX-512 BF16 runs
it, too.
"""

import functools
import itertools
from typing import Any
from unittest import mock

import pytest
import quantized
import torch
from cases import CASES, DYNAMO, VARIANTS, prompts
from conftest import (
    Factory,
    accepting,
    drafter_of,
    full_but,
    runner_of,
    start_engine,
)
from quantized import int8_kernels
from safetensors.torch import load_file
from vllm import SamplingParams

pytestmark = pytest.mark.engine

CP = VARIANTS["cp-recurrent"]
METHODS: dict[str, dict[str, Any]] = {
    "early": {"method": "early", "exit_layer": 4},
    "cp": CP,
    "cp-short": CP | {"draft_vocab_size": 100},
    "dynamo": DYNAMO,
}
QUICK = {
    ("w8a8", "early"),
    ("w8a8", "cp"),
    ("w8a8", "dynamo"),
    ("w8a8-amx", "early"),
}
# Nats between a token and the best one, from rounding to 8 bits of mantissa
NEAR = 0.25
CASES_OF_FORMATS = [
    *itertools.product(("w8a8", "w8a8-head", "w8a8-amx"), METHODS),
    *itertools.product(("awq", "gptq"), ("early", "cp-short")),
    ("gptq", "dynamo"),
    ("gptq-head", "cp-short"),
]


@pytest.fixture(scope="module")
def started(
    tiny_model: Factory, with_heads: Factory, made_once: Factory
) -> Factory:
    """started(format, method): an engine; its heads were fitted to the model before it
    was quantized.
    """

    @functools.cache
    def get(kind: str, method: str | None = None) -> Any:
        form = kind.removesuffix("-amx")
        if "w8a8" not in kind and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
            pytest.skip("vLLM has its kernel of 4 bits for AVX-512 alone")
        target = made_once(
            f"quantized-{form}",
            lambda folder: quantized.quantize(tiny_model(), folder, form),
        )
        options = (
            None
            if method is None
            else with_heads(METHODS[method], "llama", target)
        )
        with pytest.MonkeyPatch.context() as patch:
            if kind != form:
                as_if_amx(patch)
            return start_engine(target, options, dtype=quantized.dtype(kind))

    return get


def as_if_amx(patch: pytest.MonkeyPatch) -> None:
    """Have vLLM choose kernels of 8 bits as on a processor with AMX."""
    if not torch.cpu._is_avx512_bf16_supported() or not hasattr(
        torch.ops._C, "int8_scaled_mm_with_quant"
    ):
        pytest.skip(
            "vLLM's kernel for processors with AMX runs on those with AVX-512 BF16, "
            "too, but on no others"
        )
    choose = int8_kernels.check_cpu_sgl_kernel
    with_amx = mock.patch.object(
        torch.cpu, "_is_amx_tile_supported", lambda: True
    )
    patch.setattr(int8_kernels, "check_cpu_sgl_kernel", with_amx(choose))


@pytest.mark.parametrize(("kind", "method"), full_but(QUICK, CASES_OF_FORMATS))
def test_same_tokens(started: Factory, kind: str, method: str) -> None:
    llm = started(kind, method)
    alone = started(kind)
    dtype = runner_of(alone).model_config.dtype
    assert dtype == torch.bfloat16 or kind in ("w8a8", "w8a8-head")
    with accepting(llm):
        said = CASES["batch_16"](llm)
        arrived = CASES["arrivals_and_aborts"](llm)
    if dtype == torch.float32:
        assert said == CASES["batch_16"](alone)
        assert arrived == CASES["arrivals_and_aborts"](alone)
    else:
        assert worst_token(alone, prompts(16), said) < NEAR
        of_arrivals = prompts(10, 60)
        requests = [of_arrivals[int(name.split("-")[1])] for name in arrived]
        assert worst_token(alone, requests, list(arrived.values())) < NEAR


def worst_token(
    alone: Any, requests: list[Any], outputs: list[list[int]]
) -> float:
    """How far, in nats, any generated token is from the one that the target holds for
    the likeliest in its place.
    """
    texts = [
        {"prompt_token_ids": [*request["prompt_token_ids"], *ids]}
        for request, ids in zip(requests, outputs, strict=True)
    ]
    scored = alone.generate(
        texts, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False
    )
    worst = 0.0
    for text, ids in zip(scored, outputs, strict=True):
        places = text.prompt_logprobs[-len(ids) :]
        for token, place in zip(ids, places, strict=True):
            best = max(entry.logprob for entry in place.values())
            worst = max(worst, best - place[token].logprob)
    return worst


def test_another_token_is_not_near_the_best(started: Factory) -> None:
    """What the comparison in 16 bits can tell: of 640 tokens one is another."""
    alone = started("w8a8")
    outputs = CASES["batch_16"](alone)
    assert worst_token(alone, prompts(16), outputs) < NEAR
    outputs[0][20] = (outputs[0][20] + 1) % 250
    assert worst_token(alone, prompts(16), outputs) > NEAR


@pytest.mark.full
@pytest.mark.skipif(
    not torch.cpu._is_vnni_supported(),
    reason="without VNNI the product of 8 bits saturates, so rows are not the weights",
)
def test_quantized_lm_head_is_read_as_vllm_computes_it(
    started: Factory, tiny_model: Factory
) -> None:
    """The whole of it by vLLM's own product, a draft vocabulary by the dequantized rows."""
    target = drafter_of(started("w8a8-head", "cp-short")).target
    weight = load_file(tiny_model() / "model.safetensors")["lm_head.weight"]
    written = quantized.w8a8(weight)
    ids = torch.arange(50)
    rows, bias = target.lm_head.rows(ids)
    expected = (written["weight"].float() * written["weight_scale"])[ids]
    assert not torch.equal(expected, weight[ids])
    # bfloat16 where the kernel takes nothing wider
    torch.testing.assert_close(rows, expected.to(rows.dtype))
    assert not bias.any()
