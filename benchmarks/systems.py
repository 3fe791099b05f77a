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
MICRO_STEPS = 8  # most tokens that a worker group gives a request per step
STAGES = {"pipeline_parallel_size": 2}


class DecodeOptions(Options):
    """What is compared, on which prompts, and how often."""

    # Those that name systems are stored with these
    free = frozenset(
        {
            "heads",
            "plain",
            "eagle",
            "also",
            "group",
            "adaptive",
            "drafts",
            "rounds",
            "temperatures",
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
    plain: Annotated[tuple[Literal["ppd", "ngram", "none"], ...], COMMAS] = Field(
        ("ppd", "ngram"),
        description="systems without a checkpoint: ppd (prompt lookup) and vLLM's "
        "ngram; none omits both",
    )
    eagle: str | None = Field(
        None,
        description="checkpoint of an EAGLE or EAGLE-3 head, for vLLM's own method",
    )
    also: tuple[str, ...] = Field(
        (),
        description="further systems, NAME={speculative_config as JSON}; its key "
        "'engine' holds engine arguments",
    )
    group: Integers = Field(
        (),
        description="compare worker groups with these numbers of candidates, and two "
        "tensor-parallel ranks, with vLLM's two pipeline stages instead; --heads is "
        "the groups' folder of early heads",
    )
    adaptive: bool | None = Field(
        None,
        description="whether our methods draft adaptively or in every step (default: "
        "as each is configured)",
    )
    drafts: int | None = Field(
        None,
        ge=1,
        le=16,
        description="drafts per step of every system (default: what heads recommend, "
        "else 3)",
    )
    acceptance: bool = Field(
        False,
        description="decode all prompts once, in batches of a category and of the "
        "largest --batch-sizes, with drafts in every step; count accepted drafts and "
        "texts that equal vLLM's",
    )
    prompts: int | None = Field(
        None,
        ge=1,
        description="with --acceptance: most prompts, from the categories in turn "
        "(default: all)",
    )
    batch_sizes: Sizes = Field(
        (1, 2, 4, 8, 16), description="requests decoded together"
    )
    rounds: int = Field(
        5, ge=1, description="turns of each system at each batch size"
    )
    temperatures: Annotated[tuple[Temperature, ...], COMMAS] = Field(
        (0.0,),
        min_length=1,
        description="temperatures, each measured with the same engines; 0 decodes "
        "greedily",
    )
    top_p: float = Field(1.0, gt=0, le=1, description="top-p of sampling")
    prompt_tokens: int = Field(
        64,
        ge=4,
        description="most tokens of a prompt; texts are cut, longer prompts and "
        "chats are left out",
    )
    new_tokens: int = Field(
        128, ge=8, description="tokens that each request generates"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of the engines"
    )
    eager: bool = Field(
        False,
        description="run without compilation, which starts faster and runs slower",
    )
    kv_cache_gib: float = Field(
        1.0,
        gt=0,
        description="GiB of KV cache per engine; all engines are alive at once",
    )
    engine: Json[dict[str, Any]] = Field(
        {}, description="further engine arguments of all systems, as JSON"
    )
    seed: int = Field(0, ge=0, description="seed of the engines")
    out: str = Field(
        "bench.json",
        description="file of results; the same command continues a stopped run there",
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
    systems += [from_heads(folder, options.drafts) for folder in options.heads]
    drafts = options.drafts or DRAFTS
    if "ppd" in options.plain:
        systems.append(
            System(
                "ppd, no heads",
                {
                    "method": "ppd",
                    "heads": "none",
                    "num_speculative_tokens": drafts,
                },
            )
        )
    if "ngram" in options.plain:
        lookup = {
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
            "num_speculative_tokens": drafts,
        }
        systems.append(System("ngram", {"method": "ngram", **lookup}))
    if options.eagle is not None:
        systems.append(from_eagle(options.eagle, drafts))
    systems += [from_json(text, options.drafts) for text in options.also]
    names = [system.name for system in systems]
    for name in names:
        if names.count(name) > 1:
            raise BenchError(
                f"two systems have the name {name!r}; name one of them with --also "
                "NAME=..."
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
            f"--eagle {folder} has no config.json; give a checkpoint folder"
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
            f"--also {text}: not NAME={{JSON}}; give a speculative_config, as in --help"
        )
    engine = config.pop("engine", {})
    if config and drafts is not None:
        config.setdefault("num_speculative_tokens", drafts)
    return System(name, config or None, engine)


def worker_groups(options: DecodeOptions) -> list[System]:
    """Two pipeline stages twice, groups, and two tensor-parallel ranks."""
    if len(options.heads) > 1:
        raise BenchError(
            "--heads: give a single folder of early heads for worker groups"
        )
    config: dict[str, Any] = {
        "method": "ppd",
        "num_speculative_tokens": options.drafts or MICRO_STEPS - 1,
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
