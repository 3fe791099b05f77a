# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runner V2 on a CPU without Triton, with our kernels in place of
Triton's.

vLLM has a runner V2 for the CPU. It lacks only the kernels there, without a Triton that
compiles for CPUs. Where vLLM finds one, or brings a kernel of its own, ours does not
run.

Two workarounds for vLLM 0.32's CPU backend follow. Without `expand`, sampling with drafts
has the wrong distribution: `expand_kernel` spreads per-request sampling parameters over
draft tokens. For float32 and int32 outputs it fills a converted copy and drops it, so
temperature, top-k and top-p of verified drafts are whatever the memory held. vLLM's own
speculative methods, which run on its runner V1 there, are affected; greedy requests are
not. Without `unlink_shared_memory`, ranks that die leave their shared memory behind.
"""

import functools
import glob
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
)
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vllm_ppd.vllm_plugins.engine.cpu import inputs, penalties, sampling, tables
from vllm_ppd.vllm_plugins.engine.temporary import temporarily
from vllm_ppd.vllm_plugins.platform import current, has_triton, is_cpu

RUNNER = "vllm.v1.worker.gpu"

KERNELS: dict[str, Callable[..., None]] = {
    "vllm.v1.worker.utils._zero_kv_blocks_kernel": tables.zero_kv_blocks,
    f"{RUNNER}.buffer_utils._apply_write_kernel": tables.apply_write,
    f"{RUNNER}.block_table._gather_block_tables_kernel": tables.gather_block_tables,
    f"{RUNNER}.block_table._compute_slot_mappings_kernel": tables.compute_slot_mappings,
    f"{RUNNER}.input_batch._prepare_prefill_inputs_kernel": inputs.prepare_prefill_inputs,
    f"{RUNNER}.input_batch._prepare_pos_seq_lens_kernel": inputs.prepare_pos_seq_lens,
    f"{RUNNER}.input_batch._combine_sampled_and_draft_tokens_kernel": (
        inputs.combine_sampled_and_draft_tokens
    ),
    f"{RUNNER}.input_batch._get_num_sampled_and_rejected_kernel": (
        inputs.get_num_sampled_and_rejected
    ),
    f"{RUNNER}.input_batch._post_update_kernel": inputs.post_update,
    f"{RUNNER}.input_batch._post_update_num_computed_tokens_kernel": (
        inputs.post_update_num_computed_tokens
    ),
    f"{RUNNER}.input_batch._expand_idx_mapping_kernel": inputs.expand_idx_mapping,
    f"{RUNNER}.mm.rope._prepare_rope_positions_kernel": inputs.prepare_rope_positions,
    f"{RUNNER}.metrics.logits._num_nans_kernel": sampling.count_nans,
    f"{RUNNER}.sample.bad_words._bad_words_kernel": penalties.apply_bad_words,
    f"{RUNNER}.sample.gumbel._temperature_kernel": sampling.apply_temperature,
    f"{RUNNER}.sample.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
    f"{RUNNER}.sample.logit_bias._bias_kernel": penalties.apply_logit_bias,
    f"{RUNNER}.sample.logprob._topk_log_softmax_kernel": sampling.topk_log_softmax,
    f"{RUNNER}.sample.logprob._ranks_kernel": sampling.compute_ranks,
    f"{RUNNER}.sample.logprob._fill_logprob_token_ids_kernel": sampling.fill_logprob_token_ids,
    f"{RUNNER}.sample.min_p._min_p_kernel": sampling.apply_min_p,
    f"{RUNNER}.sample.output._compact_sampling_mask_kernel": sampling.compact_sampling_mask,
    f"{RUNNER}.sample.penalties._penalties_kernel": penalties.apply_penalties,
    f"{RUNNER}.sample.penalties._bincount_kernel": penalties.count_tokens,
    f"{RUNNER}.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": (
        sampling.prompt_logprobs_token_ids
    ),
    f"{RUNNER}.sample.thinking_budget._update_committed_marker_cache_kernel": (
        penalties.update_committed_markers
    ),
    f"{RUNNER}.sample.thinking_budget._thinking_budget_kernel": (
        penalties.apply_thinking_budget
    ),
    f"{RUNNER}.spec_decode.rejection_sampler._flatten_sampled_kernel": inputs.flatten_sampled,
    f"{RUNNER}.spec_decode.rejection_sampler._gather_draft_sampled_kernel": (
        inputs.gather_draft_sampled
    ),
    f"{RUNNER}.structured_outputs._apply_grammar_bitmask_kernel": (
        sampling.apply_grammar_bitmask
    ),
}


def needed() -> bool:
    """Whether runner V2 would run on a CPU without Triton in this process."""
    return is_cpu() and not has_triton()


@functools.cache
def register() -> None:
    """Have runner V2 launch our kernels in this process, once, if it has none.

    Nothing that runner V1 launches is replaced. On a CPU it zeroes blocks by code of
    its own.
    """
    if not needed():
        return
    # Before any module of runner V2: these import what it replaces.
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.triton_utils.dispatcher import register_kernels

    missing = {}
    for name, kernel in KERNELS.items():
        placeholder = placeholder_of(name)
        if placeholder is not None:
            parameters = inspect.signature(placeholder).parameters
            missing[name] = by_name(parameters, kernel)
    register_kernels(missing)
    for name in missing:
        _complete_triton(sys.modules[name.rpartition(".")[0]])


def by_name(
    parameters: Collection[str], kernel: Callable[..., None]
) -> Callable[..., None]:
    """A launch of vLLM's kernel that calls ours with the arguments that it names.

    Tensors become numpy views, except where a parameter is annotated as a Tensor.

    Args:
        parameters: names of vLLM's parameters, in order.
        kernel: our kernel.
    """
    ours = inspect.signature(kernel).parameters
    taken = []
    for name in parameters:
        parameter = ours.get(name.removesuffix("_ptr"))
        if parameter is not None:
            as_array = parameter.annotation is not Tensor
            taken.append((name, parameter.name, as_array))

    @functools.wraps(kernel)
    def launch(*args: Any, **kwargs: Any) -> None:
        kwargs.update(zip(parameters, args, strict=False))
        arguments = {}
        for name, our_name, as_array in taken:
            if name not in kwargs:
                continue
            value = kwargs[name]
            if as_array and isinstance(value, Tensor):
                value = value.numpy()
            arguments[our_name] = value
        kernel(**arguments)

    return launch


def placeholder_of(name: str) -> Callable[..., Any] | None:
    """The plain Python that vLLM would launch under a kernel's name, which cannot run;
    None if vLLM has a kernel there.
    """
    module, _, attribute = name.rpartition(".")
    kernel = getattr(resolve_name(module), attribute, None)
    return kernel if inspect.isfunction(kernel) else None


def _complete_triton(module: ModuleType) -> None:
    """Give a module's `triton`, vLLM's placeholder, the arithmetic that stands around launches."""
    from vllm.utils.math_utils import next_power_of_2

    placeholder = getattr(module, "triton", None)
    if placeholder is None or hasattr(placeholder, "next_power_of_2"):
        return
    completed = ModuleType(placeholder.__name__)
    vars(completed).update(vars(placeholder), next_power_of_2=next_power_of_2)
    module.triton = completed  # type: ignore[attr-defined]


def asynchronous(requested: bool) -> AbstractContextManager[None]:
    """A context in which vLLM keeps asynchronous scheduling on a CPU, where it turns that
    off, if a user requested it.
    """
    platform = current()
    stock = platform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        stock(vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    if not (requested and is_cpu()):
        return nullcontext()
    return temporarily(platform, check_and_update_config=check_and_update_config)


@contextmanager
def accepted() -> Iterator[None]:
    """Within this context, vLLM's checks for Triton pass, if our kernels are to run instead."""
    names = ("vllm.config.vllm", "vllm.v1.worker.gpu_worker")
    with ExitStack() as checks:
        for name in names if needed() else ():
            module: Any = sys.modules.get(name)
            if module is not None:
                checks.enter_context(temporarily(module, HAS_TRITON=True))
        yield


def expand(
    output: Tensor,  # [tokens]
    input_val: Tensor,  # [requests]
    cu_num_tokens: Tensor,  # [requests] cumulative tokens
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """output = each request's value, repeated per token, with replace_from replaced by
    replace_to.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts))


def mend_workers_to_come() -> None:
    """Let workers that this process starts later register our kernel, for vLLM's own methods."""
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand


def unlink_shared_memory(*groups: Any) -> None:
    """Unlink the shared memory of process groups whose ranks have all mapped it.

    It is then freed with the last process that has it mapped, however that ends. Groups
    without any are left alone.
    """
    for group in groups:
        communicator = getattr(group.device_communicator, "dist_module", None)
        name = getattr(communicator, "group_name", None)
        if name:
            for path in Path("/dev/shm").glob(f"{glob.escape(name)}_*"):
                path.unlink(missing_ok=True)  # another rank may remove it first
