# SPDX-License-Identifier: Apache-2.0
"""What is checked before a model loads: the options, the heads folder, and what the target's settings allow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm_ppd.heads.checkpoint import HeadsError, check_target, check_weights, kind_of, load_config
from vllm_ppd.heads.config import EarlyConfig
from vllm_ppd.heads.fingerprint import TargetFingerprint, fingerprint
from vllm_ppd.model_patches.families import NEOX, adapter_path
from vllm_ppd.vllm_plugins.config import METHODS, DraftingConfig, OptionError, parse_options, resolve

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig

WORKER = "vllm_ppd.vllm_plugins.worker.DraftingWorker"

# speculators' algorithm name of a heads folder -> the method that reads it.
METHOD_OF_HEADS = {"early": "ppd"}


def is_ours(speculative_config: dict[str, Any]) -> bool:
    """Whether a speculative_config asks for one of our methods.

    Raises:
        OptionError: if the model looks like a folder of this machine and is none.
    """
    method, model = speculative_config.get("method"), speculative_config.get("model")
    if method is not None:
        return method in METHODS or method in METHOD_OF_HEADS
    if not isinstance(model, str):
        return False
    if model in METHODS or kind_of(model) is not None:
        return True
    # vLLM would look such a name up on the Hub and fail with a page of errors.
    if model.startswith(("./", "../", "/", "~")) and not os.path.exists(os.path.expanduser(model)):
        raise OptionError(f"speculative model folder {model!r} does not exist; give a heads folder or a method name")
    return False


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
    if given.get("method") in METHOD_OF_HEADS:
        given["method"] = METHOD_OF_HEADS[given["method"]]
    given = {key: value for key, value in given.items() if value is not None}
    options = parse_options(given)
    if options.model in METHODS:
        raise OptionError(
            f"speculative_config: model={options.model!r} is a method name; leave model out, or give a heads folder"
        )
    check_supported(model_config, parallel_config)
    text_config = model_config.hf_text_config
    num_layers = text_config.num_hidden_layers
    heads_exits, default_exits, heads_drafts = None, None, None
    if options.model is not None:
        folder = os.path.expanduser(options.model)
        heads = load_config(folder, EarlyConfig.kind)
        assert isinstance(heads, EarlyConfig)
        check_target(
            heads,
            folder,
            hidden_size=text_config.hidden_size,
            vocab_size=text_config.vocab_size,
            num_hidden_layers=num_layers,
            fingerprint=_target_fingerprint(model_config),
        )
        check_weights(heads, folder)
        heads_exits, default_exits = tuple(heads.exit_layers), heads.serving_exits
        heads_drafts = heads.num_speculative_tokens
        outside = [layer for layer in heads_exits if not 1 <= layer < num_layers]
        if outside:
            raise HeadsError(f"heads in {folder!r} name exit layer {outside[0]}, outside 1..{num_layers - 1}")
    return resolve(options, num_layers, heads_exits, default_exits, heads_drafts)


def check_supported(model_config: ModelConfig, parallel_config: ParallelConfig) -> None:
    """Refuse what early drafting would get wrong.

    Raises:
        OptionError: naming the setting and what to do instead.
    """
    from vllm.platforms import current_platform

    try:
        adapter = adapter_path(model_config.architectures)
    except ValueError as error:
        raise OptionError(str(error)) from None
    refusals = {
        f"platform {current_platform.device_name!r} is not supported with early drafting; use CUDA, ROCm or CPU": (
            not (current_platform.is_cpu() or current_platform.is_cuda_alike())
        ),
        "this family is not supported with vLLM's Transformers backend; leave out --model-impl": (
            model_config.using_transformers_backend() != (adapter == NEOX)
        ),
        "data parallelism of mixture-of-experts models is not supported with early drafting": (
            parallel_config.data_parallel_size > 1 and model_config.is_moe
        ),
        "pipeline parallelism is not supported with early drafting; use --tensor-parallel-size": (
            parallel_config.pipeline_parallel_size > 1
        ),
        "decode context parallelism is not supported with early drafting": (
            getattr(parallel_config, "decode_context_parallel_size", 1) > 1
        ),
        "micro-batching (--enable-dbo) is not supported with early drafting": parallel_config.use_ubatching,
        "prompt embeddings (--enable-prompt-embeds) are not supported with early drafting": (
            model_config.enable_prompt_embeds
        ),
        "multimodal models are not supported with early drafting": model_config.is_multimodal_model,
        "pooling models do not decode; start without a speculative model": model_config.runner_type != "generate",
        f"worker class {parallel_config.worker_cls!r} cannot be combined with early drafting, which brings its own": (
            parallel_config.worker_cls not in ("auto", WORKER)
        ),
    }
    _refuse(refusals)


def check_engine_args(engine_args: Any) -> None:
    """Refuse engine arguments that have no place in the model's or the parallel configuration.

    Raises:
        OptionError: naming the argument.
    """
    refusals = {
        "LoRA (--enable-lora) is not supported with early drafting; merge the adapter first": engine_args.enable_lora,
        "--async-scheduling is not supported with early drafting; leave it out": engine_args.async_scheduling,
        "KV connectors (--kv-transfer-config) are not supported with early drafting": engine_args.kv_transfer_config,
        "KV offloading (--kv-offloading-size) is not supported with early drafting": engine_args.kv_offloading_size,
        "sleep mode (--enable-sleep-mode) is not supported with early drafting": engine_args.enable_sleep_mode,
    }
    _refuse(refusals)


def _refuse(refusals: dict[str, Any]) -> None:
    """Raise the first message whose condition holds."""
    for message, refused in refusals.items():
        if refused:
            raise OptionError(message)


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
