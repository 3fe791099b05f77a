# SPDX-License-Identifier: Apache-2.0
"""vLLM's offline engine, for writing on-policy data."""

import os
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from vllm_ppd.heads.generation.options import DataOptions
from vllm_ppd.heads.generation.write import Continuation, Request
from vllm_ppd.heads.training.parallel import cpu_computes_bfloat16
from vllm_ppd.vllm_plugins import platform

TOP_P = "ppd_top_p"  # a request's extra argument
PROCESSOR = "vllm_ppd.vllm_plugins.engine.cpu.top_p:TopP"
CPU_CACHE = 4 << 30  # most bytes of KV cache, and at most a quarter of the free memory
CPU_STEP = 1024  # tokens: longer prompts leave a core's cache and take longer per token


class OfflineEngine:
    """A vLLM engine to which requests can be added at any time.

    Args:
        options: model, sizes, precision and seed.
    """

    def __init__(self, options: DataOptions) -> None:
        self.generated = 0
        self._written: dict[str, tuple[list[int], list[str]]] = {}  # ids and pieces of text of unfinished requests
        self._on_cpu = platform.is_cpu()
        os.environ[platform.ENDS_WITH] = str(os.getpid())
        self._engine = LLM(**engine_arguments(options)).llm_engine
        del os.environ[platform.ENDS_WITH]

    def submit(self, request: Request) -> None:
        processed = self._on_cpu and request.temperature > 0 and request.top_p < 1
        # Explicit parameters, as vLLM's defaults follow the model's generation_config.json.
        params = SamplingParams(
            temperature=request.temperature, top_p=1.0 if processed else request.top_p, max_tokens=request.max_tokens,
            seed=request.seed, stop_token_ids=list(request.stop_ids) or None,
            stop=[request.stop_text] if request.stop_text else None, detokenize=request.wants_text,
            extra_args={TOP_P: request.top_p} if processed else None, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self._engine.add_request(request.key, {"prompt_token_ids": request.prompt}, params)

    def close(self) -> None:
        """End the engine's processes, which frees their memory."""
        self._engine.engine_core.shutdown()

    def step(self) -> list[Continuation]:
        ended = []
        for output in self._engine.step():
            new = output.outputs[0]
            ids, text = self._written.setdefault(output.request_id, ([], []))
            ids += new.token_ids
            text.append(new.text)
            self.generated += len(new.token_ids)
            if output.finished:
                del self._written[output.request_id]
                ended.append(Continuation(output.request_id, ids, "".join(text), str(new.finish_reason)))
        return ended


def engine_arguments(options: DataOptions) -> dict[str, Any]:
    """Arguments of vLLM's engine."""
    arguments: dict[str, Any] = {
        "model": options.model, "max_model_len": options.max_length, "seed": options.seed,
        "max_num_seqs": options.batch, "trust_remote_code": options.trust_remote_code, "dtype": options.precision,
        "use_tqdm_on_load": False,
    }  # fmt: skip
    if platform.is_cpu():
        arguments |= _cpu_arguments(options)
    return arguments if options.kv_cache_gib is None else arguments | platform.kv_cache(options.kv_cache_gib)


def _cpu_arguments(options: DataOptions) -> dict[str, Any]:
    """Arguments for all cores, memory, precision and a top-p without a sort, unless the user has set them."""
    if hasattr(os, "sched_getaffinity"):
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    arguments: dict[str, Any] = {
        "logits_processors": [PROCESSOR],
        "enforce_eager": True,  # compilation takes minutes and saves little in large batches
        # A seeded request with a chunked prompt ends vLLM 0.32's CPU engine.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_STEP, options.max_length),
    }
    if options.precision == "auto" and not cpu_computes_bfloat16():
        arguments["dtype"] = "float32"
    if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        arguments["kv_cache_memory_bytes"] = min(CPU_CACHE, free // 4)
    return arguments
