# SPDX-License-Identifier: Apache-2.0
"""What `ppd bench decode` compares: its options and the systems that they name. This module
imports nothing heavy, so that `--help` is quick.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Json

from vllm_ppd.benchmarks.storage import BASE, CONTROL, BenchError
from vllm_ppd.heads.folder import load_config
from vllm_ppd.heads.options import Options, TrustRemoteCode
from vllm_ppd.heads.text import COMMAS, Integers
from vllm_ppd.vllm_plugins.config.naming import is_ours

Sizes = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), COMMAS
]
Temperature = Annotated[float, Field(ge=0)]
DRAFTS = 3  # for systems that recommend no number
MICRO_STEPS = 8  # maximum tokens that a worker group emits per request and step
STAGES = {"pipeline_parallel_size": 2}


class DecodeOptions(Options):
    """What is compared, on which prompts, and how often."""

    # Those that name systems are stored with these
    free = frozenset(
        {
            "heads",
            "baselines",
            "eagle",
            "contender",
            "group",
            "adaptive",
            "num_speculative_tokens",
            "rounds",
            "temperatures",
            "out",
        }
    )
    basic = frozenset(
        {
            "model",
            "data",
            "heads",
            "baselines",
            "eagle",
            "contender",
            "acceptance",
            "batch_sizes",
            "rounds",
            "temperatures",
            "output_len",
            "dtype",
            "out",
        }
    )

    model: str = Field(description="target")
    data: tuple[str, ...] = Field(
        min_length=1,
        description="prompts: files as `ppd data` reads them, whose records may have a "
        "category",
    )
    heads: tuple[str, ...] = Field((), description="heads folders, each a system")
    baselines: Annotated[
        tuple[Literal["lookup", "ngram", "ngram_gpu", "none"], ...], COMMAS
    ] = Field(
        ("lookup", "ngram"),
        description="systems without a checkpoint: lookup, and vLLM's ngram and "
        "ngram_gpu; none omits them",
    )
    eagle: str | None = Field(
        None,
        description="checkpoint of an EAGLE or EAGLE-3 head, for vLLM's own method",
    )
    contender: tuple[str, ...] = Field(
        (),
        description="further systems, each NAME={speculative_config as JSON}, whose key "
        "engine has engine arguments",
    )
    group: Integers = Field(
        (),
        description="instead compare vLLM with two pipeline stages, worker groups with "
        "these numbers of candidates, and two tensor-parallel ranks; --heads has the "
        "early heads of the groups",
    )
    adaptive: bool | None = Field(
        None,
        description="let our methods draft adaptively, or in every step (default: as each "
        "is configured)",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=1,
        le=16,
        description="drafts per step of every system (default: as the heads recommend, "
        "or 3)",
    )
    acceptance: bool = Field(
        False,
        description="instead decode all prompts once, with drafts in every step, and "
        "count accepted drafts and texts that equal vLLM's; a batch has one category and "
        "the largest of --batch-sizes",
    )
    num_prompts: int | None = Field(
        None,
        ge=1,
        description="with --acceptance: number of prompts, from the categories in turn "
        "(default: all)",
    )
    batch_sizes: Sizes = Field(
        (1, 2, 4, 8, 16), description="numbers of requests decoded at once"
    )
    rounds: int = Field(
        5, ge=1, description="turns of each system at each batch size"
    )
    temperatures: Annotated[tuple[Temperature, ...], COMMAS] = Field(
        (0.0,),
        min_length=1,
        description="temperatures, each measured with the same engines; 0 is greedy",
    )
    top_p: float = Field(1.0, gt=0, le=1, description="top-p of sampling")
    prompt_tokens: int = Field(
        64,
        ge=4,
        description="maximum number of tokens in a prompt; texts are cut, and longer "
        "prompts and chats are skipped",
    )
    output_len: int = Field(
        128, ge=8, description="tokens that each request generates"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of the engines"
    )
    enforce_eager: bool = Field(
        False,
        description="run without compilation, which starts faster and decodes slower",
    )
    kv_cache_gib: float = Field(
        1.0,
        gt=0,
        description="size of the KV cache per engine in GiB; all engines run at once",
    )
    engine: Json[dict[str, Any]] = Field(
        {}, description="more engine arguments for all systems, as JSON"
    )
    seed: int = Field(0, ge=0, description="seed of the engines")
    out: str = Field(
        "bench.json",
        description="file of results; the same command continues a run from it",
    )
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True)
class System:
    """An engine to compare: its speculative_config, and further engine arguments."""

    name: str
    speculative_config: dict[str, Any] | None = None
    engine: dict[str, Any] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """What is stored with its turns; the stamp changes if the checkpoint is written again."""
        folder = (self.speculative_config or {}).get("model")
        files = Path(folder).glob("*.safetensors") if folder else []
        stamp = max((file.stat().st_mtime_ns for file in files), default=None)
        return {
            "speculative_config": self.speculative_config,
            "engine": self.engine,
            "stamp": stamp,
        }


def systems_of(options: DecodeOptions) -> list[System]:
    """vLLM alone, a second engine of it, and the systems that the options name.

    Raises:
        BenchError, HeadsError: if a checkpoint is missing, or a system is no
            speculative_config.
    """
    if options.group:
        return worker_groups(options)
    systems = [System(BASE)]
    if not options.acceptance:
        systems.append(System(CONTROL))
    systems += [
        from_heads(folder, options.num_speculative_tokens)
        for folder in options.heads
    ]
    drafts = options.num_speculative_tokens or DRAFTS
    if "lookup" in options.baselines:
        alone = {"method": "lookup", "num_speculative_tokens": drafts}
        systems.append(System("lookup", alone))
    for method in ("ngram", "ngram_gpu"):
        if method in options.baselines:
            lookup = {
                "method": method,
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
                "num_speculative_tokens": drafts,
            }
            systems.append(System(method, lookup))
    if options.eagle is not None:
        systems.append(from_eagle(options.eagle, drafts))
    systems += [
        from_json(text, options.num_speculative_tokens)
        for text in options.contender
    ]
    names = [system.name for system in systems]
    for name in names:
        if names.count(name) > 1:
            raise BenchError(
                f"two systems have the name {name!r}; rename one of them with "
                "--contender NAME=..."
            )
    adaptive = options.adaptive
    if options.acceptance and adaptive is None:
        adaptive = False
    if adaptive is not None:
        for system in systems:
            config = system.speculative_config
            if config is not None and is_ours(config):
                config.setdefault("adaptive", adaptive)
    return systems


def from_heads(folder: str, drafts: int | None) -> System:
    most = load_config(folder).max_drafts
    config: dict[str, Any] = {"model": folder}
    if drafts is not None:
        config["num_speculative_tokens"] = (
            drafts if most is None else min(drafts, most)
        )
    return System(Path(folder).name, config)


def from_eagle(folder: str, drafts: int) -> System:
    config = Path(folder) / "config.json"
    if not config.is_file():
        raise BenchError(
            f"--eagle {folder} has no config.json; pass a checkpoint folder"
        )
    method = "eagle3" if "eagle3" in config.read_text().lower() else "eagle"
    return System(
        method,
        {"method": method, "model": folder, "num_speculative_tokens": drafts},
    )


def from_json(text: str, drafts: int | None) -> System:
    name, _, value = text.partition("=")
    try:
        config = json.loads(value)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise BenchError(
            f"--contender {text}: not NAME={{JSON}}; set a speculative_config, as in "
            "--help"
        )
    engine = config.pop("engine", {})
    if config and drafts is not None:
        config.setdefault("num_speculative_tokens", drafts)
    return System(name, config or None, engine)


def worker_groups(options: DecodeOptions) -> list[System]:
    """Two pipeline stages twice, groups, and two tensor-parallel ranks."""
    if len(options.heads) > 1:
        raise BenchError(
            "--heads: pass a single folder of early heads for worker groups"
        )
    config: dict[str, Any] = {
        "method": "group",
        "num_speculative_tokens": options.num_speculative_tokens
        or MICRO_STEPS - 1,
        "disable_by_batch_size": max(options.batch_sizes),
    }
    if options.heads:
        config["model"] = options.heads[0]
    systems = [System(BASE, None, STAGES), System(CONTROL, None, STAGES)]
    for candidates in options.group:
        systems.append(
            System(
                f"group, k = {candidates}",
                config | {"candidates": candidates},
                STAGES,
            )
        )
    systems.append(System("TP 2", None, {"tensor_parallel_size": 2}))
    return systems
