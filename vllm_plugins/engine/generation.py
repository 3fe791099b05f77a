# SPDX-License-Identifier: Apache-2.0
"""vLLM's offline engine, for writing on-policy data."""

import os
from functools import partial
from typing import Any

from tqdm import tqdm
from vllm import LLM, SamplingParams

from vllm_ppd.heads.generation import Sampling
from vllm_ppd.heads.options import DataOptions
from vllm_ppd.heads.training.target import cpu_computes_bfloat16
from vllm_ppd.vllm_plugins import platform

CPU_CACHE = (
    4 << 30
)  # most bytes of KV cache, and at most a quarter of the free memory
CPU_STEP = (
    1024  # tokens: longer prompts leave a core's cache and take longer per token
)


class OfflineEngine:
    """vLLM's engine, which continues batches of prompts.

    Args:
        options: model, sizes, dtype and seed.
    """

    def __init__(self, options: DataOptions) -> None:
        os.environ[platform.ENDS_WITH] = str(os.getpid())
        self._llm = LLM(**engine_arguments(options))
        del os.environ[platform.ENDS_WITH]

    def generate(
        self, prompts: list[list[int]], seeds: list[int], sampling: Sampling
    ) -> list[Any]:
        # Explicit, as vLLM's defaults follow the model's generation_config.json
        params = [
            SamplingParams(**sampling._asdict(), seed=seed) for seed in seeds
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(
            inputs,
            params,
            use_tqdm=partial(tqdm, leave=False),
        )
        return [output.outputs[0] for output in outputs]

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def engine_arguments(options: DataOptions) -> dict[str, Any]:
    """Arguments of vLLM's engine."""
    arguments: dict[str, Any] = {
        "model": options.model,
        "max_model_len": options.max_model_len,
        "seed": options.seed,
        "max_num_seqs": options.batch_size,
        "trust_remote_code": options.trust_remote_code,
        "dtype": options.dtype,
        "use_tqdm_on_load": False,
    }
    if platform.is_cpu():
        arguments |= _cpu_arguments(options)
    if options.kv_cache_gib is not None:
        arguments |= platform.kv_cache(options.kv_cache_gib)
    return arguments


def _cpu_arguments(options: DataOptions) -> dict[str, Any]:
    """Arguments for all cores, memory and dtype, unless the user has set them."""
    if hasattr(os, "sched_getaffinity"):
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    arguments: dict[str, Any] = {
        # Compilation takes minutes and saves little in large batches
        "enforce_eager": True,
        # A seeded request with a chunked prompt ends vLLM 0.32's CPU engine.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_STEP, options.max_model_len),
    }
    if options.dtype == "auto" and not cpu_computes_bfloat16():
        arguments["dtype"] = "float32"
    if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        arguments["kv_cache_memory_bytes"] = min(CPU_CACHE, free // 4)
    return arguments
