# SPDX-License-Identifier: Apache-2.0
"""All refused combinations of options, target, heads and engine arguments, with
reasons.

Each function raises an OptionError for the first combination that it refuses.

Methods that cut the target run its layers outside of vLLM's step, over tokens that the
step's metadata does not have: settings for a step's tokens (adapters, ranks of a
context, recurrent states) do not apply to them. CP heads read a hidden state after the
step and write nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm_ppd.heads.text import LONGEST_VALUE, quoted, shortened
from vllm_ppd.model_patches.families import (
    GRANITE,
    NO_TOKEN_HEADS,
    TRANSFORMERS,
    adapter_path,
)
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.options import DraftingOptions, OptionError
from vllm_ppd.vllm_plugins.platform import PARTITION
from vllm_ppd.vllm_plugins.registry import METHODS, OURS, names

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig

    from vllm_ppd.heads.base import HeadsConfig
    from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig


def refuse_target(
    options: DraftingOptions,
    model: ModelConfig,
    parallel: ParallelConfig,
    args: Any,
) -> None:
    """Refuse a target, its parallelism and vLLM's EngineArgs."""
    method = METHODS[options.method]
    family = model.architectures[0]
    title = method.title
    cuts = method.cuts
    adapter = None
    on_cpu = platform.is_cpu()
    if options.model in names():
        raise OptionError(
            f"model={options.model!r} is a method name; remove it, or set a "
            "heads folder"
        )
    if options.model is None and method.needs_heads:
        raise OptionError(
            f"method {options.method!r} needs heads; set model=DIR, a folder written "
            f"by `ppd train {method.heads}`"
        )
    if cuts:
        refuse_cut(model, title)
        adapter = adapter_path(model.architectures)
    if method.adds_layers and adapter == TRANSFORMERS:
        raise OptionError(
            f"{family} is served by vLLM's Transformers backend, in which {title} "
            "cannot add layers; use early or CP heads"
        )
    if method.adds_layers and family in NO_TOKEN_HEADS:
        raise OptionError(
            f"{family} is not supported with {title}: this family cannot get layers "
            "yet; use early or CP heads"
        )
    machine = platform.current()
    if not machine.is_cpu() and not machine.is_cuda_alike():
        raise OptionError(
            f"platform {machine.device_name!r} is not supported with {title}; use "
            "CUDA, ROCm or CPU"
        )
    if platform.variable("VLLM_USE_V2_MODEL_RUNNER") is False:
        raise OptionError(
            "VLLM_USE_V2_MODEL_RUNNER=0 is not supported with vllm-ppd, which runs "
            "on vLLM's model runner V2; remove it"
        )
    if not on_cpu and not platform.has_triton():
        raise OptionError(
            "vllm-ppd needs Triton on a GPU, which vLLM did not find; install triton"
        )
    if parallel.data_parallel_size > 1 and model.is_moe:
        raise OptionError(
            "data parallelism of mixture-of-experts models is not supported with "
            f"{title}: vLLM's CPU build does not support it (all_gatherv), so it is "
            "untested; use --tensor-parallel-size"
        )
    if model.has_inner_state:
        raise OptionError(
            "models with a recurrent state (Mamba, gated delta nets) are not "
            f"supported with {title}: vLLM's CPU build keeps rejected drafts in it or "
            "needs bfloat16, so outputs could not be compared"
        )
    if on_cpu and model.use_mla:
        raise OptionError(
            f"latent attention (MLA) is not supported with {title} on a CPU: vLLM's "
            "build has no operator for tokens behind cached ones "
            "(gather_and_maybe_dequant_cache)"
        )
    for stage in ("decode", "prefill"):
        if getattr(parallel, f"{stage}_context_parallel_size", 1) > 1:
            raise OptionError(
                f"{stage} context parallelism is not supported with {title}: vLLM's "
                "CPU build has none, so it is untested; use --tensor-parallel-size"
            )
    if model.is_encoder_decoder:
        raise OptionError(
            f"encoder-decoder models are not supported with {title}, which drafts for "
            "decoders only; start without it"
        )
    if model.is_diffusion:
        raise OptionError(
            f"diffusion models are not supported with {title}: they do not emit one "
            "token after another; start without it"
        )
    if model.enable_prompt_embeds:
        raise OptionError(
            "prompt embeddings (--enable-prompt-embeds) are not supported with "
            f"{title}: such prompts have no token IDs to draft from"
        )
    if model.enable_trace_replay:
        raise OptionError(
            f"trace replay (--enable-trace-replay) is not supported with {title}: "
            "vLLM replays no traces in steps that verify drafts"
        )
    several = "a worker group" if options.verify else "verify: false"
    emits_drafts = method.stages > 1 or not options.verify
    if model.logits_processors and emits_drafts:
        raise OptionError(
            f"custom logits processors are not supported with {several}, where they "
            "would not see every token; remove --logits-processors"
        )
    if model.runner_type != "generate":
        raise OptionError(
            "pooling models do not decode; start without a speculative model"
        )
    if parallel.worker_cls not in ("auto", method.worker):
        raise OptionError(
            f"worker class {quoted(parallel.worker_cls)} cannot be combined with "
            f"{title}, which needs its own"
        )
    scheduler = str(args.scheduler_cls or OURS)
    if not scheduler.startswith(OURS):
        raise OptionError(
            f"--scheduler-cls {shortened(scheduler, LONGEST_VALUE)} cannot be combined "
            f"with {title}, which needs its own"
        )
    if on_cpu and args.enable_batch_sharded_sampling:
        raise OptionError(
            "--enable-batch-sharded-sampling is not supported with vllm-ppd on a "
            "CPU, for which it has no kernel; remove it"
        )
    if args.watermark_config:
        raise OptionError(
            "watermarking (--watermark-config) is not supported with vllm-ppd"
        )
    if cuts and args.aux_output_config.enable_return_routed_experts:
        raise OptionError(
            "--enable-return-routed-experts is not supported with "
            f"{title}: not every layer runs in every step; use CP heads"
        )
    if method.stages > 1 and args.return_sampling_mask:
        raise OptionError(
            "--return-sampling-mask is not supported with a worker group, whose steps "
            "emit several tokens; remove it"
        )
    if cuts and args.enable_lora:
        raise OptionError(
            f"LoRA (--enable-lora) is not supported with {title}: its passes run "
            "tokens for which vLLM sets no adapter; merge the adapter first, or use "
            "CP heads"
        )

    transfer = args.kv_transfer_config
    executor = parallel.distributed_executor_backend
    stages = parallel.pipeline_parallel_size
    if stages > 1 or method.stages > 1:
        instead = "use --tensor-parallel-size"
        within = (
            "not supported with a worker group, whose stages exchange tokens within a step; "
            f"{instead}"
        )
        if method.stages == 1:
            raise OptionError(
                "pipeline parallelism is not supported with method "
                f"{options.method!r}; use method 'group' or --tensor-parallel-size"
            )
        if stages != 2:
            raise OptionError(
                f"method 'group' has 2 pipeline stages, not {stages}; use "
                "--pipeline-parallel-size 2 with any --tensor-parallel-size"
            )
        if adapter == TRANSFORMERS:
            raise OptionError(
                f"{family} is served by vLLM's Transformers backend, whose first "
                f"pipeline stage cannot hold an LM head; {instead}"
            )
        if adapter == GRANITE:
            raise OptionError(
                f"{family} has no residual beside its hidden states, which the stages "
                f"of a worker group exchange; {instead}"
            )
        if model.is_multimodal_model:
            raise OptionError(
                "multimodal models are not supported with a worker group, whose "
                f"stages exchange only token IDs; {instead}"
            )
        if parallel.data_parallel_size > 1:
            raise OptionError(
                "data parallelism is not supported with a worker group"
            )
        # 0.33 has one Ray executor
        newer = platform.variable("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
        if executor == "ray" and not newer:
            raise OptionError(
                "vLLM's older Ray executor is not supported with a worker group: its "
                "first stage never samples; remove "
                "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0"
            )
        if transfer:
            raise OptionError(
                f"KV connectors (--kv-transfer-config) are {within}"
            )
        if args.kv_offloading_size:
            raise OptionError(f"KV offloading (--kv-offloading-size) is {within}")
        if args.enable_sleep_mode:
            raise OptionError(
                "sleep mode (--enable-sleep-mode) is not supported with a worker "
                f"group: its stages keep their own states; {instead}"
            )
    if method.writes_ahead and transfer and platform.connector_is_rdma(transfer):
        raise OptionError(
            "KV connectors that write into a GPU's memory from outside (NIXL, Mooncake) "
            f"are not supported with {title}, which may write there at the same time; "
            "use CP heads"
        )
    if cuts and transfer and platform.connector_works_by_layers(transfer):
        raise OptionError(
            "this KV connector moves KV layer by layer, which is not supported with "
            f"{title}: not every layer runs in every step; use a connector that moves "
            "blocks, or CP heads"
        )


def refuse_cut(model: ModelConfig, cutting: str) -> None:
    """Refuse targets that cannot be cut at a layer, for a method or heads that cut them."""
    try:
        adapter = adapter_path(model.architectures)
    except ValueError as error:
        raise OptionError(str(error)) from None
    if model.using_transformers_backend() != (adapter == TRANSFORMERS):
        raise OptionError(
            "vLLM's Transformers backend is not supported with this family and "
            f"{cutting}; remove --model-impl"
        )


def refuse_layers_read(
    heads: HeadsConfig, folder: str, model: ModelConfig
) -> None:
    """Refuse targets that cannot provide the states of the layers that CP heads read."""
    layers = getattr(heads, "layers", ())
    if layers:
        names = ", ".join(map(str, layers))
        reading = f"heads that read layers {names}, as those in {quoted(folder)}"
        refuse_cut(model, reading)
        if model.is_multimodal_model:
            raise OptionError(
                f"multimodal models are not supported with {reading}; train them "
                "without --layers"
            )


def refuse_options(
    options: DraftingOptions, config: DraftingConfig, heads: HeadsConfig | None
) -> None:
    """Refuse options that contradict each other, the heads, or the target's layers."""
    given = options.model_fields_set
    exits = config.exits
    folder = quoted(options.model)
    last = config.num_layers - 1
    half = (config.num_layers + 1) // 2
    has_counts = heads is not None or config.learns
    if options.draft_vocab_size and (not has_counts or config.stages > 1):
        raise OptionError(
            f"draft_vocab_size={options.draft_vocab_size} needs heads, whose token "
            "counts choose the tokens, and a single pipeline stage; leave it out"
        )
    if heads is not None:
        if (
            heads.max_drafts is not None
            and config.num_speculative_tokens > heads.max_drafts
        ):
            raise OptionError(
                f"num_speculative_tokens={config.num_speculative_tokens} is more than "
                f"the {heads.max_drafts} drafts that the heads in {folder} make"
            )
        drafted = f"draft_vocab_size={options.draft_vocab_size}"
        all_tokens = heads.target.vocab_size
        if (options.draft_vocab_size or 0) > all_tokens:
            raise OptionError(
                f"{drafted} is more than the model's vocabulary of {all_tokens}"
            )
        if config.draft_vocab_size and heads.counts_tensor is None:
            instead = (
                "remove it"
                if heads.names_target
                else "run `ppd calibrate` on them first"
            )
            raise OptionError(
                f"{drafted} needs token counts, which the heads in {folder} do not "
                f"have; {instead}"
            )
        if config.draft_vocab_size and not config.verify:
            raise OptionError(
                f"{drafted} would limit the output, because drafts are not verified; "
                "remove it"
            )

    if exits:
        exit_layer = f"exit_layer={quoted(config.exit_layer)}"
        if exits[-1] > last:
            raise OptionError(
                f"{exit_layer} is outside 1..{last}; this model has "
                f"{config.num_layers} layers"
            )
        with_head = getattr(heads, "exit_layers", exits)
        headless = sorted(set(exits) - set(with_head))
        if headless and "exit_layer" not in given:
            raise OptionError(
                f"the heads in {folder} have no exit in {half}..{last}, where a worker "
                "group's stages can be split; train one there, or remove the heads"
            )
        if headless:
            raise OptionError(
                f"exit_layer={headless[0]} has no head in {folder}, which has heads for "
                f"layers {', '.join(map(str, with_head))}"
            )
        if config.stages > 1 and (exits[0] < half or len(exits) > 1):
            raise OptionError(
                f"{exit_layer} cannot split two pipeline stages; set one layer in "
                f"{half}..{last}"
            )
        if config.stages == 1 and len(exits) > 1 and not config.adaptive:
            raise OptionError(
                f"{exit_layer} needs adaptive, which chooses among the exits; set one "
                "layer, or remove adaptive"
            )

    # Tokens of a group and unverified tokens are final.
    final = None
    if config.stages > 1:
        final = "pipeline parallelism"
    elif not config.verify:
        final = "verify: false"
    if final and options.adaptive and "adaptive" in given:
        raise OptionError(
            f"adaptive has no effect with {final}: no drafted token is rejected "
            "there; remove it"
        )
    if final and "draft_sample_method" in given:
        raise OptionError(
            f"draft_sample_method has no effect with {final}, which verifies no "
            "draft; remove it"
        )
    if options.prompt_lookup_min == 0 and config.spec.looks_up_alone:
        raise OptionError(
            "prompt_lookup_min=0 allows no drafts without heads; set at least 1, or "
            "heads"
        )
    if final and options.prompt_lookup_min:
        raise OptionError(
            f"prompt_lookup_min={options.prompt_lookup_min} is not supported with "
            f"{final}; remove it"
        )


def refuse_scheduling(config: DraftingConfig, args: Any) -> None:
    """Refuse vLLM's EngineArgs that drafts, or a worker group, do not support."""
    drawn = (
        config.draft_sample_method == "probabilistic"
        and not config.spec.looks_up_alone
    )
    if args.use_fp64_gumbel and drawn:
        raise OptionError(
            "--use-fp64-gumbel is not supported with sampled drafts: they are drawn "
            "with float32 random numbers, so few would be accepted; remove it, or "
            "set draft_sample_method greedy"
        )
    if config.stages > 1:
        if args.async_scheduling:
            raise OptionError(
                "--async-scheduling is not supported with a worker group, whose "
                "steps emit several tokens; remove it"
            )
        split = os.environ.get(PARTITION)
        if split is not None and split != config.partition:
            raise OptionError(
                f"{PARTITION}={shortened(split, LONGEST_VALUE)} is not the split of "
                f"the worker group, {config.partition}: unset it, or set exit_layer"
            )


def refuse_complete_config(config: DraftingConfig) -> None:
    """Refuse settings that vLLM decides last: it turns breakable graphs on for some
    models and for invariance.
    """
    if config.cuts and platform.variable("VLLM_USE_BREAKABLE_CUDAGRAPH"):
        raise OptionError(
            f"breakable CUDA graphs are not supported with method {config.method!r}, "
            "which runs parts of the target; set VLLM_USE_BREAKABLE_CUDAGRAPH=0 "
            "(unset, vLLM may turn them on)"
        )


def refuse_candidates(config: DraftingConfig, max_num_seqs: int) -> None:
    """Refuse more candidates than a GPU's attention backends have rows for in their buffers."""
    if not platform.is_cpu():
        requests = min(config.disable_by_batch_size or 1, max_num_seqs)
        needed = config.candidates * requests
        if needed > max_num_seqs:
            raise OptionError(
                f"candidates={config.candidates} for {requests} requests need "
                f"--max-num-seqs {needed}, not {max_num_seqs}; raise it, or lower "
                "candidates or disable_by_batch_size"
            )
