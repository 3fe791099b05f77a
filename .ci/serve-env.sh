# SPDX-License-Identifier: Apache-2.0
# Sourced by `make serve`: on a machine without a GPU, what vLLM's CPU backend wants to know. Values already set are kept.
if ! nvidia-smi -L >/dev/null 2>&1; then
    export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
    # vLLM asks for Intel's OpenMP runtime, which its CPU build installs.
    openmp="$(realpath "${VENV:-.venv}")/lib/libiomp5.so"
    if [ -z "${LD_PRELOAD:-}" ] && [ -e "$openmp" ]; then
        export LD_PRELOAD="$openmp"
    fi
fi
export VLLM_NO_USAGE_STATS="${VLLM_NO_USAGE_STATS:-1}"
