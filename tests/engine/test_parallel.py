# SPDX-License-Identifier: Apache-2.0
"""ParaDecode's schedule: one storage for all layers, batched layers as good as single ones, and what a token costs."""

import inspect
import itertools
from typing import Any

import pytest
import torch
from cases import CASES, generate, greedy, prompts
from conftest import Factory, counting, drafter_of, full_but
from torch.nn import functional

from vllm_ppd.kernels.batched_linear import batched_linear
from vllm_ppd.vllm_plugins.engine.cpu.plain_weights import plain_weights
from vllm_ppd.vllm_plugins.methods.early.parallel_layers import evenly_spaced

LAYERS = 6
PARALLEL = {"method": "paradecode", "schedule": "parallel"}
FAMILIES = full_but({"llama", "qwen3"}, ["llama", "mistral", "qwen2", "qwen3"])


def recording(owner: Any, name: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the first argument of every call."""
    original = getattr(owner, name)

    def counted(first: Any, *args: Any) -> Any:
        calls.append(first)
        return original(first, *args)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("biased", [False, True])
def test_batched_linear(dtype: torch.dtype, rows: int, biased: bool) -> None:
    """Over every third of seven layers, a view: as each layer by itself."""
    torch.manual_seed(0)
    weight, bias = torch.randn(7, 24, 16).to(dtype)[1::3], torch.randn(7, 24).to(dtype)[1::3] if biased else None
    x = torch.randn(2, rows, 16).to(dtype)
    alone = [functional.linear(x[i], weight[i], None if bias is None else bias[i]) for i in range(2)]
    torch.testing.assert_close(batched_linear(x, weight, bias), torch.stack(alone), rtol=1e-5, atol=1e-5)


def test_evenly_spaced_layers() -> None:
    """Every set of layers is covered once, in order; two need one slice, equal distances one for all."""
    for count in range(1, LAYERS + 1):
        for layers in itertools.combinations(range(LAYERS), count):
            runs = evenly_spaced(layers)
            assert [layer for run in runs for layer in range(run.start, run.stop, run.step)] == list(layers)
            assert len(runs) <= (count + 1) // 2
    assert evenly_spaced([0, 2, 4]) == [slice(0, 5, 2)]


def test_plain_weights_puts_vllm_back() -> None:
    """vLLM packs linear weights by this function, looked up when a layer has loaded."""
    from vllm.model_executor.layers import linear, utils

    assert "import dispatch_cpu_unquantized_gemm" in inspect.getsource(linear.UnquantizedLinearMethod)
    stock = utils.dispatch_cpu_unquantized_gemm
    layer = linear.ReplicatedLinear.__new__(linear.ReplicatedLinear)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.randn(8, 4))
    with plain_weights():
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert utils.dispatch_cpu_unquantized_gemm is stock
    assert layer.weight.shape == (8, 4)
    torch.testing.assert_close(layer.cpu_linear(torch.ones(1, 4), layer.weight, None)[0], layer.weight.sum(dim=1))


@pytest.mark.engine
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_views_of_a_single_storage(engine: Factory, family: str) -> None:
    stacked = drafter_of(engine(PARALLEL, family=family)).schedule.layers.stacked
    assert len(stacked.layers) == LAYERS
    assert ("self_attn.qkv_proj.bias" in stacked.weights) == (family == "qwen2")
    assert ("self_attn.q_norm.weight" in stacked.weights) == (family == "qwen3")
    for name, stack in stacked.weights.items():
        for matrix, layer in zip(stack, stacked.layers, strict=True):
            parameter = layer.get_parameter(name)
            assert parameter.data_ptr() == matrix.data_ptr() and parameter.shape == matrix.shape
        pairs = stack[1 :: LAYERS // 2]
        assert [pair.data_ptr() for pair in pairs] == [stacked.layers[i].get_parameter(name).data_ptr() for i in (1, 4)]


@pytest.mark.engine
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batched_layer_is_its_layers_in_turn(engine: Factory, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batched layer of a real run against vLLM's own layers, in the same context; and the output is vLLM's."""
    expected = CASES["batch_16"](engine(family=family))
    llm = engine(PARALLEL, family=family)
    stacked = drafter_of(llm).schedule.layers.stacked
    original, widths = stacked.run_layers, []

    def compared(which: slice, rows: Any, positions: Any, hidden: Any, residual: Any) -> Any:
        inputs = hidden.clone(), residual.clone()
        outputs = original(which, rows, positions, hidden, residual)
        for i, layer in enumerate(stacked.layers[which]):
            state = [part[i, : rows[i]].clone() for part in inputs]
            # The layer writes the same KV again.
            alone = layer(positions[i, : rows[i]], *state)
            for part, together in zip(alone, outputs, strict=True):
                torch.testing.assert_close(together[i, : rows[i]], part, rtol=0, atol=1e-5)
        widths.append((which.step, *rows))
        return outputs

    monkeypatch.setattr(stacked, "run_layers", compared)
    assert CASES["batch_16"](llm) == expected
    pairs = [width for width in widths if len(width) == 3]
    assert {pair[0] for pair in pairs} == {LAYERS // 2}
    assert any(pair[1] != pair[2] for pair in pairs)  # padded


@pytest.mark.engine
@pytest.mark.parametrize("exit_layer", [3, 2])
def test_what_a_token_costs(
    engine: Factory, fitted_heads: Factory, exit_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that an exit predicted rightly starts l layers after the one before it, any other L layers."""
    heads = fitted_heads("early", head="classifier")
    llm = engine({**PARALLEL, "model": heads, "exit_layer": exit_layer, "num_speculative_tokens": 4})
    schedule, calls = drafter_of(llm).schedule, []
    recording(schedule.layers.stacked, "run_layers", calls, monkeypatch)
    plans: list[Any] = []
    recording(schedule, "run", plans, monkeypatch)
    with counting(llm) as seen:
        generate(llm, prompts(1), greedy())
    kept = seen["early_predictions"] - seen["early_rejections"]
    tokens = sum(int(plan.max_drafts[0]) + 1 for plan in plans)
    assert 0 < kept < tokens
    assert len(calls) == (tokens - kept) * LAYERS + kept * exit_layer
    # The final layer chose every draft, and no step but the prompt's ran the model.
    assert seen["accepted"] == seen["drafted"] == tokens - len(plans)
    assert seen["deferred_steps"] == len(plans)
    assert max(len(range(which.start, which.stop, which.step)) for which in calls) == LAYERS // exit_layer


@pytest.mark.engine
def test_gamma_decides_what_an_exit_may_predict(engine: Factory) -> None:
    made = []
    for gamma in (0.0, 0.03, 0.99):
        llm = engine({**PARALLEL, "gamma": gamma})
        with counting(llm) as seen:
            generate(llm, prompts(3), greedy())
        made.append(seen["early_predictions"])
    assert made[0] > made[1] > made[2] == 0
