# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's features a method runs with: what is refused, and why it must be.

Methods that cut the target run its layers outside vLLM's own step, over tokens that the step's metadata does not know:
what vLLM sets for a step's tokens (adapters, ranks of a context, recurrent states) does not hold there. CP heads read a
hidden state after the step, and write nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ppd.heads.quote import LONGEST_VALUE, quoted, shortened
from vllm_ppd.model_patches.families import NO_TOKEN_HEADS, TRANSFORMERS, adapter_path
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.registry import MethodSpec

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig

    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig

WORKER = "vllm_ppd.vllm_plugins.engine.v1.worker.DraftingWorker"
WORKER_V2 = "vllm_ppd.vllm_plugins.engine.v2.worker.DraftingWorker"


def refuse(refusals: dict[str, Any]) -> None:
    """Raise the first message whose condition holds.

    Raises:
        OptionError: with that message.
    """
    for message, refused in refusals.items():
        if refused:
            raise OptionError(message)


def check_supported(method: MethodSpec, model_config: ModelConfig, parallel_config: ParallelConfig) -> None:
    """Refuse targets and ranks that a method would get wrong.

    Raises:
        OptionError: naming the setting and what to do instead.
    """
    if method.cuts:
        _check_family(method, model_config)
    worker = quoted(parallel_config.worker_cls)
    refuse({
        f"platform {platform.device_name()!r} is not supported with {method.title}; use CUDA, ROCm or CPU": (
            not platform.is_supported()
        ),
        f"data parallelism of mixture-of-experts models is not supported with {method.title}: vLLM's CPU "
        "build has none (all_gatherv), so it was never run; use --tensor-parallel-size": (
            parallel_config.data_parallel_size > 1 and model_config.is_moe
        ),
        f"models with a recurrent state (Mamba, gated delta nets) are not supported with {method.title}: vLLM's CPU "
        "build keeps rejected drafts in it or needs bfloat16, so no output could be compared": (
            model_config.has_inner_state
        ),
        f"latent attention (MLA) is not supported with {method.title} on a CPU: vLLM's build lacks the operator for "
        "tokens behind cached ones (gather_and_maybe_dequant_cache)": platform.is_cpu() and model_config.use_mla,
        f"decode context parallelism is not supported with {method.title}: vLLM's CPU build has none, so it was never "
        "run; use --tensor-parallel-size": getattr(parallel_config, "decode_context_parallel_size", 1) > 1,
        f"micro-batching (--enable-dbo) is not supported with {method.title}": parallel_config.use_ubatching,
        f"prompt embeddings (--enable-prompt-embeds) are not supported with {method.title}: such a prompt has no token "
        "IDs to draft from": model_config.enable_prompt_embeds,
        "custom logits processors are not supported while drafting: vLLM applies none to drafted positions": (
            bool(model_config.logits_processors)
        ),
        "pooling models do not decode; start without a speculative model": model_config.runner_type != "generate",
        f"worker class {worker} cannot be combined with {method.title}, which brings its own": (
            parallel_config.worker_cls not in ("auto", WORKER, WORKER_V2)
        ),
    })  # fmt: skip


def _check_family(method: MethodSpec, model_config: ModelConfig) -> None:
    try:
        adapter = adapter_path(model_config.architectures)
    except ValueError as error:
        raise OptionError(str(error)) from None
    refuse({
        "this family is not supported with vLLM's Transformers backend; leave out --model-impl": (
            model_config.using_transformers_backend() != (adapter == TRANSFORMERS)
        ),
        f"{model_config.architectures[0]} is served by vLLM's Transformers backend, in which {method.title} cannot add "
        "layers; use early or CP heads": adapter == TRANSFORMERS and method.heads == "dynamo",
        f"{model_config.architectures[0]} is not supported with {method.title}: nobody has added layers to this family "
        "yet; use early or CP heads": (
            model_config.architectures[0] in NO_TOKEN_HEADS and method.heads == "dynamo"
        ),
    })  # fmt: skip


def check_engine_args(engine_args: Any, config: DraftingConfig) -> None:
    """Refuse engine arguments that have no place in the model's or the parallel configuration.

    Raises:
        OptionError: naming the argument.
    """
    scheduler = shortened(str(engine_args.scheduler_cls), LONGEST_VALUE)
    method, group, transfer = config.spec, config.stages > 1, engine_args.kv_transfer_config
    refuse({
        f"LoRA (--enable-lora) is not supported with {method.title}: its passes run tokens for which vLLM has set no "
        "adapter; merge the adapter first, or use CP heads": engine_args.enable_lora and method.cuts,
        "KV connectors (--kv-transfer-config) are not supported with a worker group, whose stages exchange tokens "
        "within a step; use --tensor-parallel-size": transfer and group,
        f"this KV connector moves KV a layer at a time, which is not supported with {method.title}: not every layer "
        "runs in every step; use a connector of blocks, or CP heads": (
            transfer and method.cuts and platform.connector_works_by_layers(transfer)
        ),
        "KV offloading (--kv-offloading-size) is not supported with a worker group, whose stages exchange tokens "
        "within a step; use --tensor-parallel-size": engine_args.kv_offloading_size and group,
        "sleep mode (--enable-sleep-mode) is not supported with a worker group: its stages keep states of their own; "
        "use --tensor-parallel-size": engine_args.enable_sleep_mode and group,
        f"--scheduler-cls {scheduler} cannot be combined with a worker group, which brings its own": (
            group and engine_args.scheduler_cls not in (None, method.group and method.group.scheduler)
        ),
    })  # fmt: skip
