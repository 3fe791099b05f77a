# SPDX-License-Identifier: Apache-2.0
"""What of vLLM this package leans on: what it imports, wraps or overrides, and what it
assumes the working of.

`python tests/touched.py --record` notes the source of each for the vLLM that is
installed, in touched.json.
"""

import ast
import hashlib
import importlib
import inspect
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from vllm_ppd.vllm_plugins.engine.cpu.native import KERNELS
from vllm_ppd.vllm_plugins.patches.install import PATCHES, vllm_version

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_name("touched.json")
PLUGIN = "vllm_ppd.vllm_plugins.engine"
GROUP = "vllm_ppd.vllm_plugins.methods.group"
V2 = "vllm.v1.worker.gpu"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"

# Classes of ours, and those of vLLM whose methods they override.
OVERRIDING = {
    f"{GROUP}.runner:GroupModelRunner": f"{V2}.model_runner:GPUModelRunner",
    f"{PLUGIN}.worker:StepCostsMixin": "vllm.v1.worker.gpu_worker:Worker",
    f"{GROUP}.scheduler:GroupScheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    f"{PLUGIN}.scheduler:CountingScheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    f"{PLUGIN}.scheduler:DraftingScheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    f"{PLUGIN}.runner:DraftingRunnerMixin": f"{V2}.model_runner:GPUModelRunner",
    f"{PLUGIN}.speculator:Speculator": f"{V2}.spec_decode.speculator:DraftModelSpeculator",
    f"{PLUGIN}.runner:UpdatedRunner": f"{V2}.model_runner:GPUModelRunner",
    f"{PLUGIN}.verification:Verification": f"{V2}.spec_decode.rejection_sampler:RejectionSampler",
}
# What is called or assumed beside.
ASSUMED = [
    # A speculator without a model registers nothing
    f"{V2}.eplb_utils:EPLBController.maybe_register_speculator",
    # Resolves names of heads by get_model_path
    "vllm.engine.arg_utils:EngineArgs.__post_init__",
    # Whose global unseen_by_connectors hides
    "vllm.distributed.kv_transfer.kv_transfer_state:has_kv_transfer_group",
    f"{CONNECTOR}:KVConnectorBase_V1.requires_piecewise_for_cudagraph",
    # Counts steps in flight, takes placeholder drafts
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule",
    # Laid out anew by kv_blocks.added_blocks
    "vllm.v1.kv_cache_interface:KVCacheTensor",
    # Runner V2's step, and what stands around a speculator.
    *(
        f"{V2}.model_runner:GPUModelRunner.{name}"
        for name in (
            "execute_model",
            "sample_tokens",
            "sample",
            "postprocess_sampled",
            "capture_model",
            "prepare_attn",
            "gather_batch_req_state",
            "_dummy_run",
            "update_pp_decode_requests",
        )
    ),
    # How the tokens of a group step reach the first stage.
    *(
        f"{V2}.pp_utils:PPHandler.{name}"
        for name in ("get_prev_sampled_outputs", "receive", "broadcast")
    ),
    f"{V2}.input_batch:post_update",
    f"{V2}.sample.sampler:Sampler.sample",
    f"{V2}.sample.sampler:Sampler._sample_random",
    # Writes what add_request stages, so nothing in a step without new requests
    f"{V2}.sample.sampler:Sampler.apply_staged_writes",
    # What the log-probabilities of sharded requests leave out
    f"{V2}.sample.sampler:Sampler.get_logprobs_dims",
    f"{V2}.sample.logprob:LogprobTokenIdsState.max_num_token_ids",
    # Of dense models
    "vllm.config.parallel:ParallelConfig.reconfigure_for_independent_dp_rank",
    "vllm.v1.worker.gpu_worker:Worker.update_max_model_len",
    f"{V2}.sample.sampler:Sampler.apply_sampling_params",
    # Placeholders of as many drafts
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
    # What DraftingScheduler takes the place of
    "vllm.v1.spec_decode.dynamic.utils:build_dynamic_sd_schedule_lookup",
    f"{V2}.model_runner:GPUModelRunner.load_model",
    *(
        f"{V2}.cudagraph_utils:CudaGraphManager.{name}"
        for name in (
            "__init__",
            "_init_candidates",
            "capture",
            "dispatch",
            "run_fullgraph",
        )
    ),
    f"{V2}.cudagraph_utils:ModelCudaGraphManager.capture",
    f"{V2}.block_table:BlockTables.compute_slot_mappings",
    f"{V2}.states:RequestState.add_request",
    "vllm.ir.op:IrOp.set_priority",
    f"{V2}.sample.states:SamplingStates.add_request",
    "vllm.v1.worker.gpu_worker:Worker._make_model_runner",
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device",
]


def resolved(symbol: str) -> Any:
    """What `module:name.name` names, or what stood there before our patch."""
    module, _, path = symbol.partition(":")
    first, *others = path.split(".")
    value: Any = getattr(importlib.import_module(module), first, None)
    if value is None:
        value = importlib.import_module(f"{module}.{first}")
    for name in others:
        value = inspect.getattr_static(value, name)
    value = (
        value.fget
        if isinstance(value, property)
        else getattr(value, "__func__", value)
    )
    return inspect.unwrap(value) if callable(value) else value


def imported() -> set[str]:
    """`module:name` of everything that the plugin and the model patches import from vLLM."""
    symbols = set()
    for folder in ("vllm_plugins", "model_patches"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.ImportFrom)
                    and (node.module or "").split(".")[0] == "vllm"
                ):
                    symbols |= {
                        f"{node.module}:{alias.name}" for alias in node.names
                    }
    return symbols


def overridden() -> set[str]:
    """`module:Class.method` of vLLM's methods that classes of ours override."""
    symbols = set()
    for ours, theirs in OVERRIDING.items():
        base = resolved(theirs)
        for name, value in vars(resolved(ours)).items():
            if (
                inspect.isfunction(value) or isinstance(value, property)
            ) and hasattr(base, name):
                symbols.add(f"{theirs}.{name}")
    return symbols


def replaced() -> set[str]:
    """`module:name` of vLLM's kernels for which a CPU has ours."""
    return {":".join(name.rsplit(".", 1)) for name in KERNELS}


def wrapped() -> set[str]:
    """Of the patches."""
    return {
        f"{owner}.{name}" if ":" in owner else f"{owner}:{name}"
        for owner, name, _ in PATCHES
    }


def digest(symbol: str) -> str:
    """Of a function its code without comments and docstrings; of a class its fields and
    how it is made.
    """
    try:
        value = resolved(symbol)
    except (ImportError, AttributeError):
        return "gone"
    if inspect.isclass(value):
        fields = sorted(_own_fields(value))
        try:
            return _hash(f"{fields} {list(inspect.signature(value).parameters)}")
        except (TypeError, ValueError):
            return _hash(str(fields))
    # A kernel may be another object than a function
    if callable(value) and "." not in symbol.partition(":")[2]:
        source = _source_in_module(symbol)
        if source is not None:
            return digest_of_code(ast.Module([source], []))
    if inspect.isfunction(value):
        return digest_of_code(
            ast.parse(textwrap.dedent(inspect.getsource(value)))
        )
    return _hash(type(value).__name__)


def _own_fields(value: type) -> set[str]:
    """Without those of its bases, which some libraries copy into a class at run time."""
    fields = set(getattr(value, "__annotations__", {}))
    for base in value.__mro__[1:]:
        fields -= set(getattr(base, "__annotations__", {}))
    return fields


def _source_in_module(symbol: str) -> ast.FunctionDef | None:
    """A module's own function of that name: vLLM's CPU worker replaces some when it is imported."""
    module, _, name = symbol.partition(":")
    for node in ast.parse(
        inspect.getsource(importlib.import_module(module))
    ).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


def digest_of_code(code: ast.Module) -> str:
    """Of code without its docstrings."""
    for node in ast.walk(code):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            del body[0]
    return _hash(ast.dump(code))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def now() -> dict[str, str]:
    """Every symbol with its digest in the vLLM that is installed."""
    symbols = imported() | overridden() | wrapped() | replaced() | set(ASSUMED)
    return {symbol: digest(symbol) for symbol in sorted(symbols)}


def version() -> str:
    """vLLM's version as the record has it: 0.32, 0.33."""
    return ".".join(vllm_version().split(".")[:2])


def record() -> None:
    """Note the installed version."""
    every = json.loads(RECORD.read_text())
    every[version()] = now()
    RECORD.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__" and "--record" in sys.argv:
    record()
