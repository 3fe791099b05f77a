# SPDX-License-Identifier: Apache-2.0
"""Everything to be known on a machine with a GPU: exactness, kernels, their times, and the speed of decoding.

    python -m vllm_ppd.benchmarks.gpu.run --out build/gpu             # on a GPU, with vLLM and this package installed
    python -m vllm_ppd.benchmarks.gpu.run --out build/gpu-cpu --cpu   # tiny, on the CPU: does it run to its end?

Parts run one after the other, each in a process of its own and for 8 minutes at most, and land in OUT/results.json as
they end. A stopped run keeps them; the same command goes on with what is missing or failed. OUT holds each part's log.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_ppd.benchmarks import only_writer
from vllm_ppd.benchmarks.gpu.entries import Entries

ROOT = Path(__file__).resolve().parent.parent.parent
PPD = [sys.executable, "-m", "vllm_ppd.vllm_plugins.cli.main"]
# The order in which a failure says most: what a user gets first, runner V2; then the patches, long matrices last.
V2_TESTS = ["v2_exactness", "v2_early", "v2_speculator", "v2_sampling"]
TESTS = [*V2_TESTS, "units", "patches", "kernels", "triton", "interpreter", "exactness", "parallel", "families",
         "sampling", "unverified", "memory", "tensor_parallel"]  # fmt: skip
CPU_TESTS = ["units", "kernels"]
# What takes longer than a part may: by the names of its cases.
SPLIT = {"exactness": ("cp", "dynamo", "parallel", "not (cp or dynamo or parallel)")}
LIMIT = 480  # seconds of a part: lent machines end a command after ten minutes
ENGINES = 3  # alive at once, which start together
SHARE = 0.2  # of the GPU's memory for the weights of each
BATCHES = (1, 2, 4, 8, 16, 32, 64)
PROMPT_TOKENS, NEW_TOKENS = 64, 128


class Part(NamedTuple):
    """A command whose end is recorded; result is a JSON file that it leaves."""

    name: str
    command: list[str]
    result: Path | None = None
    environment: tuple[tuple[str, str], ...] = ()  # beside this process's own


def model_shape(cpu: bool) -> dict[str, Any]:
    """A Llama-3 with as many layers as fill the GPU; a tiny one for the CPU."""
    shape: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    if cpu:
        tiny = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
        return {**shape, **tiny, "head_dim": 32, "vocab_size": 512, "num_hidden_layers": 4, "torch_dtype": "float32"}
    memory = torch.cuda.get_device_properties(0).total_memory
    layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    layers = int((SHARE * memory - 2 * 2 * 128_256 * 4096) / layer)
    if layers < 4:
        raise SystemExit(f"this GPU has {memory >> 30} GiB; {ENGINES} engines of four layers of this width do not fit")
    return {**shape, "num_hidden_layers": min(layers, 126)}


def kv_gib(shape: dict[str, Any]) -> float:
    """A KV cache of each engine that holds the largest batch, an eighth more for drafts and partly filled blocks."""
    token = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    needed = max(BATCHES) * (PROMPT_TOKENS + NEW_TOKENS + 32) * token
    return max(1.0, round(1.125 * needed / (1 << 30) + 0.05, 1))


def usual_tests(cpu: bool) -> list[str]:
    """Of this machine; ranks of tensor parallelism have a GPU each."""
    if cpu:
        return CPU_TESTS
    return [name for name in TESTS if name != "tensor_parallel" or torch.cuda.device_count() > 1]


def write_model(folder: Path, cpu: bool) -> dict[str, Any]:
    """A model folder of a config alone (weights are drawn at random), and prompts for it; the config."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model_shape(cpu)
    (folder / "config.json").write_text(json.dumps(shape, indent=1))
    prompts = [[(37 * i + j * j) % (shape["vocab_size"] - 2) + 2 for j in range(PROMPT_TOKENS)] for i in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in prompts))
    return shape


def parts(args: argparse.Namespace, shape: dict[str, Any]) -> list[Part]:
    """What is run, in order, with a model of this shape."""
    out, made = args.out.resolve(), []
    for name in usual_tests(args.cpu) if args.tests is None else args.tests:
        path = next((ROOT / "tests").rglob(f"test_{name}.py"), ROOT / "tests" / f"test_{name}.py")
        environment = (("PPD_TEST_V2", "1"),) if name in V2_TESTS else ()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not full", str(path)]
        for cases in SPLIT.get(name, ("",)):
            chosen = ["-k", cases] if cases else []
            made.append(Part(" ".join(["tests:", name, *cases.split()]), [*command, *chosen], environment=environment))
    made.append(decode(args, shape))
    command = [sys.executable, "-m", "vllm_ppd.benchmarks.gpu.kernels", "--out", str(out / "kernels.json")]
    command += ["--cpu"] if args.cpu else []
    command += ["--bandwidth", str(args.bandwidth)] if args.bandwidth else []
    command += ["--peak", str(args.peak)] if args.peak else []
    made.append(Part("kernel times", command, out / "kernels.json"))
    return made


def decode(args: argparse.Namespace, shape: dict[str, Any]) -> Part:
    """The speed of decoding, in turns: vLLM alone on V2 and V1; drafts on V2, there without asynchrony, and on V1."""
    out, model = args.out.resolve(), args.out.resolve() / "model"
    sizes = ["--batch-sizes", "1", "--rounds", "1", "--new-tokens", "8", "--eager"] if args.cpu else []
    if not sizes:
        sizes = ["--batch-sizes", ",".join(map(str, BATCHES)), "--rounds", "3", "--kv-cache-gib", str(kv_gib(shape))]
        sizes += ["--prompt-tokens", str(PROMPT_TOKENS), "--new-tokens", str(NEW_TOKENS), "--together"]
    command = [*PPD, "bench", "decode", "--model", str(model), "--data", str(model / "prompts.jsonl")]
    command += ["--alive", str(ENGINES), "--engine", json.dumps({"load_format": "dummy"}), *sizes]
    # Random weights say the same over and over and accept nearly all drafts: what a step costs is what counts here.
    always = {"method": "ppd", "adaptive": False}
    also: dict[str, dict[str, Any]] = {"ppd, every draft": always}
    if not args.cpu:
        also["ppd, synchronous"] = {**always, "engine": {"async_scheduling": False}}
        also["ppd, runner V1"] = {**always, "runner": "v1"}
        also["vLLM, runner V1"] = {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
    command += ["--plain", "ngram", "--also", *(f"{name}={json.dumps(config)}" for name, config in also.items())]
    return Part("decode", [*command, "--out", str(out / "decode.json")], out / "decode.json")


def run_part(part: Part, log: Path, limit: float = LIMIT) -> dict[str, Any]:
    """Run a part to its end, or for so many seconds; its record."""
    started = time.perf_counter()
    with log.open("w") as stream:
        environment = {**os.environ, **dict(part.environment)}
        process = subprocess.Popen(
            part.command, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except BaseException as reason:  # engines are processes of their own, which must not outlive their part
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
            code = None
    lines = log.read_text(errors="replace").splitlines()
    record: dict[str, Any] = {
        "status": "passed" if code == 0 else f"stopped after {limit:g} s" if code is None else f"failed with {code}",
        "command": part.command,
        "seconds": round(time.perf_counter() - started, 1),
        "end": lines[-1:] if code == 0 else lines[-30:],
    }
    if part.result is not None and part.result.exists():
        record["result"] = json.loads(part.result.read_text())
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU: proves that everything runs")
    parser.add_argument(
        "--tests", nargs="*", metavar="NAME", help=f"of tests/test_NAME.py (default: {' '.join(TESTS)})"
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a part (default: %(default)g)")
    parser.add_argument("--bandwidth", type=float, help="GB/s of the GPU's memory, in place of a measurement")
    parser.add_argument("--peak", type=float, help="its bfloat16 TFLOP/s, in place of a measurement")
    parser.add_argument("--again", nargs="*", default=[], metavar="PART", help="run although they passed")
    parser.add_argument("--skip", nargs="*", default=[], metavar="PART", help="leave out, this time")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        parser.error("no GPU here; --cpu runs tiny sizes on the CPU")
    with only_writer(args.out):
        return run_parts(args, parser)


def run_parts(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run what is missing or failed; 1 if a part fails."""
    kept = {key: value for key, value in vars(args).items() if key in ("cpu", "bandwidth", "peak")}
    results = Entries(args.out / "results.json", kept)
    planned = parts(args, write_model(args.out / "model", args.cpu))
    names = {part.name for part in planned} | {part.name.partition(":")[0] for part in planned}
    if unknown := {*args.again, *args.skip} - names:
        parser.error(f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in planned)}")
    failed = False
    for part in planned:
        kind = part.name.partition(":")[0]
        if {part.name, kind} & {*args.skip}:
            continue
        entry = results.content["entries"].get(part.name, {})
        if entry.get("status") != "passed" or {part.name, kind} & {*args.again}:
            print(f"{part.name} ...", flush=True)
            entry = run_part(part, args.out / f"{part.name.replace(': ', '-').replace(' ', '-')}.log", args.limit)
            results.add(part.name, entry)
        failed |= entry["status"] != "passed"
        print(f"{part.name}: {entry['status']}, {' '.join(entry.get('end', [])[-1:])}", flush=True)
    print(f"wrote {results.path}")
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
