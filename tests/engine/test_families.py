# SPDX-License-Identifier: Apache-2.0
"""Every supported family, on a tiny random model: shallow then deep is the whole model,
and greedy output is vLLM's.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import heads_folders
import pytest
import tiny
import torch
from cases import CASES
from conftest import ROOT, Factory, accepting, drafter_of, full_but, start_engine
from transformers import AutoConfig

from vllm_ppd.model_patches.adapters import TransformersAdapter
from vllm_ppd.model_patches.base import ModelCut
from vllm_ppd.model_patches.families import FAMILIES, NO_TOKEN_HEADS
from vllm_ppd.vllm_plugins.methods.early.deferred_kv import DeferredKVCut

pytestmark = pytest.mark.engine

# vLLM makes the expert-parallel group with the process's first engine, if that is a
# mixture of experts; and where it serves a family through transformers, it changes
# transformers' classes for the rest of the process.
EXPERTS = {"qwen3_moe", "mixtral", "gpt_oss", "llama4"}
TRANSFORMERS_BACKEND = {"gpt_neox", "olmo2", "olmo3", "smollm3"}
SEPARATE_PROCESS = EXPERTS | TRANSFORMERS_BACKEND
SEPARATE_PROCESS_FLAG = "PPD_TEST_OWN_PROCESS"


@pytest.fixture(autouse=True)
def separate_process(request: pytest.FixtureRequest) -> None:
    """Run a test of some families in a process of its own, unless this is that process."""
    family = getattr(request.node, "callspec", None)
    if family is None or family.params["family"] not in SEPARATE_PROCESS:
        return
    if SEPARATE_PROCESS_FLAG in os.environ:
        return
    options = ["-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, request.node.nodeid]
    environment = {**os.environ, SEPARATE_PROCESS_FLAG: "1"}
    run = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    pytest.skip("passed in a process of its own")


def whole_model(
    adapter: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """vLLM's own forward of the decoder, the class's method that the cut replaced on
    the instance.
    """
    decoder = adapter.decoder
    if not isinstance(adapter, TransformersAdapter):
        return type(decoder).forward(
            decoder,
            input_ids,
            positions,
            None,
        )
    output = type(decoder).forward(
        decoder,
        input_ids=input_ids[None],
        position_ids=positions[None],
        use_cache=False,
        return_dict=False,
    )
    return output[0][0]


def architecture(family: str) -> str:
    return tiny.architecture(family).__name__


def test_every_family_has_a_tiny_model() -> None:
    assert set(map(architecture, tiny.FAMILIES)) == FAMILIES.keys()


# One of each adapter; two KV cache groups. The others differ from Llama inside vLLM's
# own layers.
CUT_QUICKLY = {"llama", "gemma3", "granite"}
TWO_CASES = "batch_16", "arrivals_and_aborts"


@pytest.mark.parametrize("family", full_but(CUT_QUICKLY, tiny.FAMILIES))
def test_cut_is_exact(
    family: str,
    tiny_model: Factory,
    alone: Factory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same tokens in one batch three ways; the KV that they write is the same each time."""
    expected = [alone(case, family=family) for case in TWO_CASES]
    differences: dict[str, list[float]] = {"cut": [], "deferred": []}
    original = DeferredKVCut.forward

    def compare(
        self: DeferredKVCut,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *rest: Any,
    ) -> torch.Tensor:
        whole = whole_model(self.adapter, input_ids, positions).clone()
        stacks = ModelCut.forward(self, input_ids, positions).clone()
        differences["cut"].append((stacks - whole).abs().max().item())
        hidden = original(
            self,
            input_ids,
            positions,
            *rest,
        )
        if self.deferred is not None and self.deferred.deep:
            differences["deferred"].append((hidden - whole).abs().max().item())
        return hidden

    monkeypatch.setattr(DeferredKVCut, "forward", compare)
    llm = start_engine(tiny_model(family), {"method": "early", "exit_layer": 4})
    with accepting(llm) as seen:
        assert [CASES[case](llm) for case in TWO_CASES] == expected
    assert seen["deferred_steps"] > 5
    assert max(differences["cut"]) == 0.0
    # The deferred path ran each token through the shallow layers in a batch of another
    # shape: rounding only.
    assert len(differences["deferred"]) > 5
    assert max(differences["deferred"]) < 1e-4


DYNAMO = [
    family
    for family in tiny.FAMILIES.keys() - TRANSFORMERS_BACKEND
    if architecture(family) not in NO_TOKEN_HEADS
]


@pytest.mark.parametrize(
    "family", full_but({"gemma3"}, sorted(DYNAMO))
)  # it has two KV cache groups
def test_token_heads_of_every_family(
    family: str,
    engine: Factory,
    alone: Factory,
    fitted_heads: Factory,
) -> None:
    """DynaMo's layers are of the family's own class, take its checkpoint's names, and
    write KV of their own.
    """
    expected = [alone(case, family=family) for case in TWO_CASES]
    options = {"method": "dynamo", "model": fitted_heads("dynamo", family)}
    llm = engine(options | {"eps_b": 0.0}, family=family)
    cut = drafter_of(llm).target.cut
    kinds = [type(layer) for layer in cut.branches.layers]
    assert kinds == [type(cut.adapter.layers[-1])] * 2
    with accepting(llm):
        assert [CASES[case](llm) for case in TWO_CASES] == expected


# CP heads read a hidden state and the LM head, whatever the layers are and whoever runs
# them.
@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt_neox", "olmo2", "gpt_oss", "llama4"])
def test_cp_heads_need_no_adapter(
    family: str,
    tiny_model: Factory,
    engine: Factory,
    alone: Factory,
    tmp_path: Path,
) -> None:
    expected = [alone(case, family=family) for case in TWO_CASES]
    model = tiny_model(family)
    sizes = {"hidden_size": AutoConfig.from_pretrained(model).hidden_size}
    heads = heads_folders.make_heads(
        tmp_path / "cp",
        "cp",
        model,
        sizes,
    )
    llm = engine({"method": "cp", "model": str(heads)}, family=family)
    assert [CASES[case](llm) for case in TWO_CASES] == expected
    assert llm.counts["drafted"] > 0
