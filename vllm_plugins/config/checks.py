# SPDX-License-Identifier: Apache-2.0
"""What is checked before a model loads: the options, the heads folder, and what the target's settings allow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.fingerprint import fingerprint
from vllm_ppd.heads.hub import pinned
from vllm_ppd.heads.io import CONFIG_NAME, check_folder, check_target, kind_of, load_config
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.layout import TargetFingerprint
from vllm_ppd.heads.quote import quoted
from vllm_ppd.heads.target_check import check_layers
from vllm_ppd.model_patches.families import GRANITE, STACKABLE, TRANSFORMERS, adapter_path
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.features import WORKER, WORKER_V2, check_supported, refuse
from vllm_ppd.vllm_plugins.config.options import DraftingOptions, OptionError, parse_options
from vllm_ppd.vllm_plugins.config.resolve import resolve
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.config.runner import Runners
from vllm_ppd.vllm_plugins.registry import METHOD_OF_HEADS, METHODS, MethodSpec

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig

PARTITION = "VLLM_PP_LAYER_PARTITION"  # vLLM's own variable for layers a stage

# What changes a layer of Llama's build where a model's configuration has it.
_NOT_STACKABLE = ("ada_rms_norm_t_cond", "llama_4_scaling", "dual_chunk_attention_config")


def worker_of(config: DraftingConfig) -> str:
    """Dotted path of the worker that vLLM starts."""
    return WORKER_V2 if config.runner == "v2" else WORKER


def resolve_options(
    speculative_config: dict[str, Any], model_config: ModelConfig, parallel_config: ParallelConfig
) -> DraftingConfig:
    """Check a speculative_config of ours against the target and fill in what it leaves open.

    Raises:
        OptionError, HeadsError: one line each: what is wrong, where, what to do instead.
    """
    given = dict(speculative_config)
    if given.get("method") is None and given.get("model") in METHODS:
        given["method"] = given.pop("model")  # `--speculative-model ppd` names the method, not a folder
    if isinstance(given.get("model"), str):
        given["model"] = pinned(os.path.expanduser(given["model"]), CONFIG_NAME)
    kind = kind_of(given["model"]) if isinstance(given.get("model"), str) else None
    if given.get("method") is None and kind is not None:
        given["method"] = METHOD_OF_HEADS[kind]
    if given.get("method") in METHOD_OF_HEADS:
        given["method"] = METHOD_OF_HEADS[given["method"]]
    known = DraftingOptions.model_fields
    given = {key: value for key, value in given.items() if value is not None or key not in known}
    options = parse_options(given)
    method = METHODS[options.method]
    if options.model in METHODS:
        raise OptionError(
            f"speculative_config: model={quoted(options.model)} is a method name; leave model out, or give a "
            "heads folder"
        )
    if options.model is None and method.needs_heads:
        raise OptionError(
            f"speculative_config: method {options.method!r} drafts with heads; give model=DIR, "
            f"a folder that `ppd train {method.heads}` wrote"
        )
    check_supported(method, model_config, parallel_config)
    if options.schedule == "parallel":
        check_stacking(model_config, parallel_config)
    stages = parallel_config.pipeline_parallel_size
    if stages > 1:
        check_group(options, method, model_config, parallel_config)
    heads = None if options.model is None else _check_heads(options, method, model_config)
    needs_v1 = "a multimodal target" if model_config.is_multimodal_model else None
    runners = Runners(
        platform.asked_runner(), platform.default_runner(), platform.has_triton(), needs_v1, platform.full_device_name()
    )
    return resolve(options, model_config.hf_text_config.num_hidden_layers, heads, stages, runners)


def check_stacking(model_config: ModelConfig, parallel_config: ParallelConfig) -> None:
    """Refuse targets whose layers cannot be views of one storage and run in one product.

    Raises:
        OptionError: naming what stands against it.
    """
    name, config = model_config.architectures[0], model_config.hf_text_config
    odd = [key for key in _NOT_STACKABLE if getattr(config, key, None)]
    instead = "with schedule 'parallel'; use 'deferred'"
    refuse({
        f"{name} is not supported {instead}; it runs {', '.join(STACKABLE)}": name not in STACKABLE,
        f"quantised weights ({model_config.quantization}) are not supported {instead}": bool(model_config.quantization),
        f"tensor parallelism is not supported {instead}": parallel_config.tensor_parallel_size > 1,
        f"{', '.join(odd)} in the model's configuration is not supported {instead}": bool(odd),
    })  # fmt: skip


def check_group(
    options: DraftingOptions, method: MethodSpec, model_config: ModelConfig, parallel_config: ParallelConfig
) -> None:
    """Refuse what a worker group over pipeline stages would get wrong.

    Raises:
        OptionError: naming the setting and what to do instead.
    """
    refuse({
        f"pipeline parallelism is not supported with method {options.method!r}; use method 'ppd' or "
        "--tensor-parallel-size": method.group is None,
    })  # fmt: skip
    adapter = adapter_path(model_config.architectures)
    refuse({
        f"a worker group has 2 pipeline stages, not {parallel_config.pipeline_parallel_size}; use "
        "--pipeline-parallel-size 2 with --tensor-parallel-size N": parallel_config.pipeline_parallel_size != 2,
        f"gamma={options.gamma:g} is not supported with pipeline parallelism: an idle stage loses nothing by starting "
        "an unsure token; leave it out": options.gamma > 0,
        "max_drafting_requests is not supported with pipeline parallelism; use disable_by_batch_size": (
            options.max_drafting_requests is not None
        ),
        f"{model_config.architectures[0]} is served by vLLM's Transformers backend, whose first pipeline stage cannot "
        "hold an LM head; use --tensor-parallel-size": adapter == TRANSFORMERS,
        f"{model_config.architectures[0]} has no residual beside its hidden states, which the stages of a worker group "
        "exchange; use --tensor-parallel-size": adapter == GRANITE,
        "multimodal models are not supported with a worker group, whose stages exchange token IDs alone; use "
        "--tensor-parallel-size": model_config.is_multimodal_model,
        "data parallelism is not supported with a worker group": parallel_config.data_parallel_size > 1,
        "the external_launcher executor is not supported with a worker group; use mp or ray": (
            parallel_config.distributed_executor_backend == "external_launcher"
        ),
        "vLLM's older Ray executor is not supported with a worker group: its first stage never samples; leave out "
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0": (
            parallel_config.distributed_executor_backend == "ray" and platform.older_ray_executor()
        ),
    })  # fmt: skip


def check_candidates(config: DraftingConfig, max_num_seqs: int) -> None:
    """Refuse more candidates at once than a GPU's attention backends have room for: a row of their buffers each.

    Raises:
        OptionError: with the number that it takes.
    """
    requests = min(config.disable_by_batch_size or 1, max_num_seqs)
    needed = config.candidates * requests
    refuse({
        f"candidates={config.candidates} for {requests} requests take --max-num-seqs {needed}, not {max_num_seqs}; "
        "raise it, or lower candidates or disable_by_batch_size": needed > max_num_seqs and not platform.is_cpu(),
    })  # fmt: skip


def _check_heads(options: DraftingOptions, method: MethodSpec, model_config: ModelConfig) -> HeadsConfig:
    """Check a heads folder against the target.

    Raises:
        HeadsError: if they do not fit.
    """
    folder, text_config = str(options.model), model_config.hf_text_config
    heads = load_config(folder, KINDS[method.heads] if method.heads else None)
    check_target(
        heads,
        folder,
        hidden_size=text_config.hidden_size,
        vocab_size=text_config.vocab_size,
        num_hidden_layers=text_config.num_hidden_layers,
        fingerprint=_target_fingerprint(model_config),
    )
    check_layers(heads, folder, text_config)
    check_folder(folder)
    return heads


def check_scheduling(engine_args: Any, config: DraftingConfig) -> None:
    """Refuse what the model runner that was chosen cannot do.

    Raises:
        OptionError: naming the argument.
    """
    because = f" ({config.v1_because})" if config.v1_because else ""
    asked, on_v2 = bool(engine_args.async_scheduling), config.runner == "v2"
    breakable = platform.breakable_graphs()
    refuse({
        f"--async-scheduling is not supported with runner V1{because}; leave it out": asked and not on_v2,
        "adaptive on runner V2 is vLLM's adaptive verification, which needs whole-model CUDA graphs: leave it out, or "
        "--enforce-eager, or give runner v1": (
            config.adaptive and on_v2 and (engine_args.enforce_eager or platform.is_cpu())
        ),
        f"VLLM_USE_BREAKABLE_CUDAGRAPH=1 is not supported with {config.spec.title}; unset it": (
            breakable and config.spec.cuts
        ),
        "watermarking (--watermark-config) is not supported with vllm-ppd": engine_args.watermark_config,
    })  # fmt: skip


def _target_fingerprint(model_config: ModelConfig) -> TargetFingerprint:
    """Hashes of the target, as far as it is on this disk."""
    model = model_config.model
    if os.path.isdir(model):
        return fingerprint(model)
    try:
        from huggingface_hub import snapshot_download

        return fingerprint(snapshot_download(model, revision=model_config.revision, local_files_only=True))
    except (OSError, ValueError):
        return TargetFingerprint()
