# SPDX-License-Identifier: Apache-2.0
"""Engines for the tests. They run in this process, so that tests can look inside; each
is started once and shared.
"""

import contextlib
import functools
import json
import logging
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

# Before vLLM is imported anywhere.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# On a GPU vLLM's attention would round float32 to TF32
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
# It would win over an engine's own kv_cache_memory_bytes
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import tiny
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "benchmarks" / "demo" / "model"
# Several pytest workers run at once: a core each, except for tests with ranks
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
CORES = sorted(os.sched_getaffinity(0))
FORKING = (
    "tests/distributed",
    "tests/benchmarks/test_decode",
    "tests/unit/plugin/test_fit",
    "tests/unit/heads/training/test_checkpoint",
)
Factory = Callable[
    ..., Any
]  # a fixture that makes, or starts, what it is asked for


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes the tests of a file, or all that fork processes, of which one
    process imports vLLM.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(FORKING):
                return "forking"
            return super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if WORKER:
        core = CORES[int(WORKER.removeprefix("gw")) % len(CORES)]
        ranks = item.get_closest_marker("ranks")
        os.sched_setaffinity(0, CORES if ranks else [core])


def full_but(quick: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test, those of `make test-full` marked: all that are not quick."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in quick else [pytest.mark.full],
        )
        for case in cases
    ]


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    """A .jsonl file of texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def patterned_texts(count: int, repeats: int) -> list[str]:
    """Texts with structure enough to be learned in a few steps."""
    return [
        f"the {i % 7} and the {i % 5} are {i % 3}; " * repeats
        for i in range(count)
    ]


def cells_of(table: str) -> list[list[str]]:
    """The cells of the Markdown table in a text, its header first."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines
    ]
    return [
        row for row in rows if not all(set(cell) <= set("-:") for cell in row)
    ]


@pytest.fixture(scope="session", autouse=True)
def classes_are_inspected_here() -> Iterator[None]:
    """vLLM inspects a model's class in a process of its own, which takes over ten seconds.
    With each engine it looks for kernels in all modules, of which the first time counts.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    once = functools.cache(CpuPlatform.register_triton_kernel_overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        patch.setattr(
            CpuPlatform, "register_triton_kernel_overrides", staticmethod(once)
        )
        yield


@pytest.fixture(scope="session")
def made_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, Callable[[Path], Any]], Path]:
    """made_once(name, make): a folder that make(folder) has filled, once for all
    processes that run tests.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if WORKER else base) / "shared"
    shared.mkdir(exist_ok=True)

    def get(name: str, make: Callable[[Path], Any]) -> Path:
        folder = shared / name
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                unfinished = shared / f"{name}.unfinished"
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(folder)
        return folder

    return get


@pytest.fixture(scope="session")
def tiny_model(made_once: Factory) -> Callable[..., Path]:
    """A tiny random model of a family, made once a session."""
    return lambda family="llama": made_once(
        family, lambda folder: tiny.make_model(folder, family)
    )


@pytest.fixture(scope="session")
def other_model(made_once: Factory) -> Path:
    """A model of the tiny llama's sizes with other weights."""
    return made_once(
        "llama-other", lambda folder: tiny.make_model(folder, seed=1)
    )


@contextlib.contextmanager
def our_log(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Our messages in a block, which vLLM's logger does not hand on; an engine that
    starts in it ends this.
    """
    messages: list[str] = []
    logger = logging.getLogger("vllm.vllm_ppd")
    handler = logging.Handler(level)
    handler.emit = (  # type: ignore[method-assign]
        lambda record: messages.append(record.getMessage())
    )
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def start_engine(
    model: Path,
    speculative_config: dict[str, Any] | None,
    on_v2: bool = False,
    **settings: Any,
) -> Any:
    """A vLLM engine in float32 with a small KV cache. Ours always makes every draft,
    heads and exits draft without lookups, and steps are scheduled asynchronously, as on a
    GPU, unless told otherwise.

    Args:
        model: its folder.
        speculative_config: None for vLLM alone.
        on_v2: whether vLLM alone runs on model runner V2, the reference for seeds. On a
            CPU its own runner is V1.
        settings: of vLLM.
    """
    import plain_v2
    from forkserver import forking_workers
    from vllm import LLM

    from vllm_ppd.vllm_plugins.config.naming import is_ours
    from vllm_ppd.vllm_plugins.platform import kv_cache

    if speculative_config is not None and is_ours(speculative_config):
        alone: dict[str, Any] = {"adaptive": False}
        if {"model", "exit_layer"} & speculative_config.keys():
            alone["prompt_lookup_min"] = 0
        speculative_config = {**alone, **speculative_config}
        if settings.get("pipeline_parallel_size", 1) == 1:
            settings = {"async_scheduling": True, **settings}

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 16,
        # Far less than the prompts together: prefill comes in chunks
        "max_num_batched_tokens": 96,
        "block_size": 32,
        **kv_cache(1 / 32),
        "seed": 0,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
    }
    if on_v2:
        defaults["additional_config"] = plain_v2.MARK
    with (
        plain_v2.starting() if on_v2 else contextlib.nullcontext(),
        forking_workers(),
    ):
        llm = LLM(
            model=str(model),
            speculative_config=speculative_config,
            **{**defaults, **settings},
        )
    keep_alive(llm)
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is not None:
        llm.counts = _count(core.scheduler)
    return llm


def keep_alive(llm: Any) -> None:
    """Have an engine outlive its test: when it is collected, it takes the parallel
    groups of all others along.
    """
    _ALIVE.append(llm)


def end_workers(llm: Any) -> None:
    """End an engine whose workers are processes; its own shutdown would take this
    process's groups from the others.
    """
    core = llm.llm_engine.engine_core.engine_core
    core.model_executor.shutdown()
    core.scheduler.shutdown()


def _count(scheduler: Any) -> Counter[str]:
    """Count what the scheduler tells vLLM's metrics (their registry knows the newest
    engine of a process only).
    """
    counts: Counter[str] = Counter()
    stats = scheduler.make_spec_decoding_stats
    preempt = scheduler._preempt_request

    def make_spec_decoding_stats(*args: Any, **kwargs: Any) -> Any:
        counts.update(
            drafted=kwargs["num_draft_tokens"],
            accepted=kwargs["num_accepted_tokens"],
            drafts=1,
        )
        return stats(*args, **kwargs)

    def preempt_request(*args: Any, **kwargs: Any) -> Any:
        counts.update(preempted=1)
        return preempt(*args, **kwargs)

    scheduler.make_spec_decoding_stats = make_spec_decoding_stats
    scheduler._preempt_request = preempt_request
    return counts


_ALIVE: list[Any] = []


@contextlib.contextmanager
def engines(tiny_model: Factory) -> Iterator[Callable[..., Any]]:
    """get(speculative_config, family, **settings): an engine of a tiny model; the same
    arguments give the same engine. Of those with several ranks, which take half a
    gigabyte a rank, the latest three live.
    """
    started: dict[str, Any] = {}
    with_ranks: list[str] = []

    def get(
        speculative_config: dict[str, Any] | None = None,
        family: str = "llama",
        **settings: Any,
    ) -> Any:
        key = repr((speculative_config, family, sorted(settings.items())))
        if key not in started:
            started[key] = start_engine(
                tiny_model(family), speculative_config, **settings
            )
            parallel = started[key].llm_engine.vllm_config.parallel_config
            if parallel.world_size > 1:
                with_ranks.append(key)
        if len(with_ranks) > 3:
            end_workers(started.pop(with_ranks.pop(0)))
        return started[key]

    yield get
    for key in with_ranks:
        end_workers(started[key])


@pytest.fixture(scope="session")
def engine(tiny_model: Factory) -> Iterator[Callable[..., Any]]:
    """engines() of the session."""
    with engines(tiny_model) as get:
        yield get


@pytest.fixture(scope="session")
def alone(engine: Factory) -> Callable[..., Any]:
    """alone(case, **settings): what vLLM says to a case without speculation; it is asked once."""
    from cases import CASES

    return functools.cache(
        lambda case, **settings: CASES[case](engine(**settings))
    )


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def drafter_of(llm: Any) -> Any:
    """Our speculator in an engine in this process."""
    return runner_of(llm).speculator


@contextlib.contextmanager
def counting(llm: Any) -> Iterator[Counter[str]]:
    """By how much an engine's counts and our counters (of all engines of this process
    together) grow in a block.
    """
    from vllm_ppd.vllm_plugins.engine.scheduler import CountingScheduler

    grown = Counter[str]()
    before = dict(llm.counts)
    stock = CountingScheduler.report

    def report(self: Any, counts: Any) -> None:
        grown.update(counts)
        stock(self, counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountingScheduler, "report", report)
        yield grown
    after = Counter[str](llm.counts)
    after.subtract(before)
    grown.update({name: count for name, count in after.items() if count})


@contextlib.contextmanager
def accepting(llm: Any) -> Iterator[Counter[str]]:
    """counting(), where drafts are accepted in the block."""
    with counting(llm) as seen:
        yield seen
    assert seen["accepted"] > 0


@contextlib.contextmanager
def results_of(
    owner: Any, name: str, read: Callable[[Any], Any] = lambda result: result
) -> Iterator[list[Any]]:
    """What an object's method returns in each call within, as it is read at once."""
    stock = getattr(owner, name)
    results = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        results.append(read(result))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, noted)
        yield results


def run_script(
    script: str, *arguments: Any, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script that imports the tests' modules in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
    )
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
    return run


@pytest.fixture(scope="session")
def heads_folder(
    tiny_model: Factory, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """heads_folder(exit_layers, noise): a hand-made heads folder for the tiny llama; T
    is the identity plus noise.
    """
    import heads_folders
    import torch

    from vllm_ppd.heads.folder import save_heads

    def get(exit_layers: tuple[int, ...] = (3,), noise: float = 0.0) -> Path:
        exits = list(exit_layers)
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("heads")
        config = heads_folders.config_of(
            "early", tiny_model(), exit_layers=exits, default_exit_layers=exits
        )
        tensors = {
            name: torch.eye(64) + noise * torch.randn(64, 64)
            for name in config.shapes()
        }
        save_heads(folder, config, tensors)
        return folder

    return get


@pytest.fixture(scope="session")
def whole_heads(tiny_model: Factory, made_once: Factory) -> Callable[[str], Path]:
    """whole_heads(kind): a sound heads folder for the tiny llama; to be copied, not
    changed.
    """
    import heads_folders

    return lambda kind: made_once(
        kind, lambda folder: heads_folders.make_heads(folder, kind, tiny_model())
    )


@pytest.fixture(scope="session")
def said(engine: Factory) -> Callable[..., list[list[int]]]:
    """said(family): prompts of the exactness suite with what the tiny model answers,
    greedy and sampled.
    """
    from cases import greedy, prompts
    from vllm import SamplingParams

    @functools.cache
    def get(family: str = "llama") -> list[list[int]]:
        requests = prompts(16) + [{"prompt_token_ids": [7, 40, 3, 99, 12]}] * 48
        # Seeded, or what heads are fitted to would depend on the tests before.
        sampled = [
            SamplingParams(
                temperature=0.8, max_tokens=12, ignore_eos=True, seed=i
            )
            for i in range(48)
        ]
        outputs = engine(family=family).generate(
            requests, [greedy()] * 16 + sampled, use_tqdm=False
        )
        return [
            [*output.prompt_token_ids, *output.outputs[0].token_ids]
            for output in outputs
        ]

    return get


@pytest.fixture(scope="session")
def fitted_heads(
    tiny_model: Factory, said: Factory, made_once: Factory
) -> Callable[..., str]:
    """fitted_heads(kind, family, **options): heads fitted to what a tiny model says,
    made once a session.
    """
    import overfitted

    from vllm_ppd.heads.kinds import KINDS

    def get(kind: str, family: str = "llama", **options: Any) -> str:
        fields = KINDS[kind].options.model_fields
        options = {
            name: value
            for name, value in options.items()
            if value != fields[name].default
        }
        name = "-".join(
            [
                kind,
                family,
                *(
                    f"{option}={value}"
                    for option, value in sorted(options.items())
                ),
            ]
        )
        folder = made_once(
            name,
            lambda folder: overfitted.fit(
                tiny_model(family),
                kind,
                said(family),
                folder / "heads",
                **options,
            ),
        )
        return str(folder / "heads")

    return get


@pytest.fixture(scope="session")
def with_heads(
    heads_folder: Factory,
    fitted_heads: Factory,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., dict[str, Any]]:
    """with_heads(options, family, target): options whose "heads", a kind and how they
    are made, become their model.

    With a target, heads of the family's tiny model are named anew for a model that says
    what that one says.
    """
    import overfitted

    hand_made = functools.cache(heads_folder)

    def get(
        options: dict[str, Any], family: str = "llama", target: Path | None = None
    ) -> dict[str, Any]:
        if "heads" not in options:
            return options
        kind, how = options["heads"]
        made = (
            hand_made(**how)
            if kind == "hand-made"
            else fitted_heads(kind, family, **how)
        )
        if target is not None:
            made = overfitted.moved(
                made, target, tmp_path_factory.mktemp("heads")
            )
        return {
            name: value for name, value in options.items() if name != "heads"
        } | {"model": str(made)}

    return get


@pytest.fixture(scope="session")
def drafting(engine: Factory, with_heads: Factory) -> Callable[..., Any]:
    """drafting(options, family, **settings): an engine of a tiny model with heads for
    it, as with_heads has them.
    """
    return lambda options, family="llama", **settings: engine(
        with_heads(options, family), family, **settings
    )
