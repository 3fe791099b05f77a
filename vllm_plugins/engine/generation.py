# SPDX-License-Identifier: Apache-2.0
"""vLLM's offline engine, for writing on-policy data."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from tqdm import tqdm
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)

from vllm_ppd.heads.generation import Sampling
from vllm_ppd.heads.options import DataOptions, TrainingOptions
from vllm_ppd.heads.training.extracted import EXTRACTED
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
        further: arguments of vLLM's engine.
    """

    def __init__(self, options: DataOptions, **further: Any) -> None:
        os.environ[platform.ENDS_WITH] = str(os.getpid())
        self._llm = LLM(**engine_arguments(options) | further)
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
            inputs, params, use_tqdm=partial(tqdm, leave=False)
        )
        return [output.outputs[0] for output in outputs]

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class StatesEngine(OfflineEngine):
    """vLLM's engine, which computes the states of documents after some layers, by its
    method and connector that extract them.

    Args:
        options: of a training.
        layers: numbers of layers, ascending.
    """

    def __init__(self, options: TrainingOptions, layers: Sequence[int]) -> None:
        folder = {"shared_storage_path": f"{options.states_cache}/extracted"}
        data = DataOptions.model_validate(
            {
                "model": options.model,
                "out": "",
                "max_model_len": options.sequence_length + EXTRACTED,
                "dtype": options.dtype,
                "tensor_parallel_size": options.tensor_parallel_size,
                "trust_remote_code": options.trust_remote_code,
            }
        )
        super().__init__(
            data,
            enable_prefix_caching=False,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": [*layers]}
                },
            },
            kv_transfer_config={
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": folder,
            },
        )

    def states(self, documents: list[list[int]]) -> list[Tensor]:
        """The states of each document's tokens: [tokens, layers, hidden]."""
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids in documents],
            SamplingParams(temperature=0, max_tokens=1),
            use_tqdm=False,
        )
        states = []
        for output in outputs:
            path = output.kv_transfer_params["hidden_states_path"]
            states.append(load_hidden_states(path)["hidden_states"])
            cleanup_hidden_states(path)
        return states


def engine_arguments(options: DataOptions) -> dict[str, Any]:
    """Arguments of vLLM's engine."""
    arguments: dict[str, Any] = {
        "model": options.model,
        "max_model_len": options.max_model_len,
        "seed": options.seed,
        "max_num_seqs": options.batch_size,
        "trust_remote_code": options.trust_remote_code,
        "tensor_parallel_size": options.tensor_parallel_size,
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
