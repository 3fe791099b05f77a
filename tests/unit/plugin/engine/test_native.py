# SPDX-License-Identifier: Apache-2.0
"""Which kernels of runner V2 are replaced on a CPU without Triton; nothing else of vLLM changes."""

import importlib
import inspect
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import vllm
from conftest import ROOT
from vllm.config import VllmConfig
from vllm.triton_utils import triton
from vllm.triton_utils.dispatcher import KernelOverride, register_kernels

from vllm_ppd.vllm_plugins.engine.cpu import native
from vllm_ppd.vllm_plugins.platform import has_triton

CASES = ROOT / "tests" / "v2_kernels"
VLLM = Path(vllm.__file__).parent
# Launched by runner V2; its other modules belong to vLLM's runner V1 and to models.
SOURCES = [
    *VLLM.glob("v1/worker/gpu/**/*.py"),
    VLLM / "v1/worker/utils.py",
    VLLM / "v1/worker/mamba_utils.py",
]

# Modules of vLLM with kernels of which there is none here, by the setting that reaches
# them.
MISSING = (
    f"{native.RUNNER}.cp_utils.",  # --decode-context-parallel-size
    f"{native.RUNNER}.sample.batch_shard.",  # --enable-batch-sharded-sampling
    f"{native.RUNNER}.sample.watermark.",  # --watermark-config
    f"{native.RUNNER}.model_states.prompt_embeds.",  # --enable-prompt-embeds
    f"{native.RUNNER}.sample.trace_replay.",  # --enable-trace-replay
    # A model with a recurrent state
    f"{native.RUNNER}.model_states.mamba_hybrid.",
    f"{native.RUNNER}.model_states.recoverssm.",
    "vllm.v1.worker.mamba_utils.",
    # A speculative method of vLLM's own, adaptive verification
    f"{native.RUNNER}.spec_decode.",
)

without_triton = pytest.mark.skipif(
    has_triton(), reason="vLLM has its own kernels here"
)


def launched_kernels() -> set[str]:
    """Dotted names of the Triton kernels that a file launches: `kernel[grid](...)`."""
    names = set()
    for path in SOURCES:
        module = ".".join(("vllm", *path.relative_to(VLLM).with_suffix("").parts))
        source = path.read_text()
        defined = set(re.findall(r"^@\S*jit\b.*?^def (\w+)", source, re.S | re.M))
        launches = set(re.findall(r"\b(\w+)\[", source))
        names |= {f"{module}.{name}" for name in defined & launches}
    return names


def test_every_kernel_is_replaced_or_known_to_be_missing() -> None:
    launched = launched_kernels()
    assert len(launched) > 60 and native.KERNELS.keys() <= launched
    missing = launched - native.KERNELS.keys()
    assert not [name for name in missing if not name.startswith(MISSING)]


def test_every_kernel_is_tested() -> None:
    cases = "".join(path.read_text() for path in CASES.glob("*.py"))
    untested = {
        name
        for name in native.KERNELS
        if f'"{name.rpartition(".")[2]}"' not in cases
    }
    assert not untested


@without_triton
def test_nothing_of_runner_v1_is_replaced() -> None:
    native.register()
    ours = native.KERNELS.values()
    holders = {
        name
        for name, module in list(sys.modules.items())
        for value in list(vars(module).values())
        if isinstance(value, KernelOverride)
        and inspect.unwrap(value.func) in ours
    }
    assert holders == {name.rpartition(".")[0] for name in native.KERNELS}
    assert not hasattr(triton, "next_power_of_2")


@without_triton
def test_checks_for_triton_pass_within_alone() -> None:
    """For a stock engine before and after one of ours, runner V2 still needs Triton."""
    modules: list[Any] = [
        importlib.import_module("vllm.config.vllm"),
        importlib.import_module("vllm.v1.worker.gpu_worker"),
    ]
    checking = [module for module in modules if hasattr(module, "HAS_TRITON")]
    config = VllmConfig()
    for inside in (False, True, False):
        with native.accepted() if inside else nullcontext():
            assert [module.HAS_TRITON for module in checking] == [inside] * len(
                checking
            )
    assert config.use_v2_model_runner is False


@without_triton
def test_kernels_that_vllm_brings_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plain(logits_ptr: Any) -> None: ...

    name = "vllm.v1.worker.gpu.sample.min_p._min_p_kernel"
    monkeypatch.setattr(name, plain)
    assert native.placeholder_of(name) is plain
    register_kernels({name: plain})
    assert native.placeholder_of(name) is None


@without_triton
@pytest.mark.full
def test_without_any_triton() -> None:
    """Also in a process that cannot import it."""
    program = """
import sys
sys.modules["triton"] = None
import torch
from vllm_ppd.vllm_plugins.engine.cpu import native
native.register()
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
print(compute_token_logprobs(torch.zeros(1, 4), torch.zeros(1, 1, dtype=torch.int64)).exp().item())
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
    )
    assert run.stdout.endswith("0.25\n"), run.stdout + run.stderr
