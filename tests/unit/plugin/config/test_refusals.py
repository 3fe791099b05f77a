# SPDX-License-Identifier: Apache-2.0
"""Refusals: each is one line that says what to do, before a model loads."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import transformers
from configured import from_dict, from_flags
from conftest import Factory
from heads_folders import make_heads
from vllm import EngineArgs, envs
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform

from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.options import OptionError, parse_options
from vllm_ppd.vllm_plugins.config.refusals import refuse_candidates, refuse_scheduling
from vllm_ppd.vllm_plugins.config.resolve import resolve
from vllm_ppd.vllm_plugins.platform import PARTITION

PPD = "--speculative-model ppd"
EARLY = f"{PPD} --ppd-exit-layer 3"
GROUP = f"{PPD} --pipeline-parallel-size 2"
LAYER_BY_LAYER = (
    """'{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", """
    """"kv_connector_extra_config": {"use_layerwise": true}}'"""
)


def asked(json: str) -> str:
    return f"-sc '{json}'"


@contextmanager
def refused(message: str | None) -> Iterator[None]:
    """A block that ends in a refusal of a single short line; None: in none."""
    if message is None:
        yield
        return
    with pytest.raises((OptionError, HeadsError), match=message) as refusal:
        yield
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) <= 300


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # What vLLM's settings rule out
        (f"{EARLY} --enable-lora", "LoRA .* is not supported"),
        (f"{PPD} --enable-prompt-embeds", "prompt embeddings"),
        (
            f"{PPD} --logits-processors a:B",
            "custom logits processors are not supported",
        ),
        (f"{PPD} --worker-cls a.B", "worker class 'a.B' cannot be combined"),
        (
            f"{EARLY} --kv-transfer-config {LAYER_BY_LAYER}",
            "this KV connector moves KV layer by layer, which is not supported with "
            "early drafting",
        ),
        (
            f"{EARLY} --model-impl transformers",
            "Transformers backend is not supported with this family",
        ),
        (
            f"""{PPD} --watermark-config '{{"algorithm": "gumbelmax", "key": 1}}'""",
            "watermarking",
        ),
        (
            f"{EARLY} --prefill-context-parallel-size 2",
            "prefill context parallelism is not supported",
        ),
        # The worker group
        (
            "--speculative-model paradecode --pipeline-parallel-size 2",
            "pipeline parallelism is not supported with method 'paradecode'; use "
            "method 'ppd'",
        ),
        (
            f"{PPD} --pipeline-parallel-size 3",
            "a worker group has 2 pipeline stages, not 3",
        ),
        (
            f"{GROUP} --kv-offloading-size 1",
            "KV offloading .* is not supported with a worker group",
        ),
        (
            f"{GROUP} --ppd-gamma 0.5",
            "gamma=0.5 is not supported with pipeline parallelism",
        ),
        (
            f"{GROUP} --ppd-exit-layer 2",
            r"exit_layer=2 cannot split two pipeline stages; give one layer in 3\.\.5",
        ),
        (f"{GROUP} --ppd-exit-layer 6", r"exit_layer=6 is outside 1\.\.5"),
        (
            f"{GROUP} --ppd-candidates 9",
            "candidates=.9.: Input should be less than or equal to 8",
        ),
        (
            f"{GROUP} --ppd-prompt-lookup-min 2",
            "prompt_lookup_min=2 is not supported with pipeline parallelism",
        ),
        (
            f"{GROUP} --ppd-adaptive true",
            "adaptive has no effect with pipeline parallelism: no drafted token is",
        ),
        (
            f"{GROUP} --ppd-draft-sample-method greedy",
            "draft_sample_method has no effect with pipeline parallelism",
        ),
        (f"{GROUP} --scheduler-cls a.B", "--scheduler-cls a.B cannot be combined"),
        (f"{GROUP} --async-scheduling", "--async-scheduling is not supported"),
        (
            f"{GROUP} --data-parallel-size 2",
            "data parallelism is not supported with a worker group",
        ),
        (f"{PPD} --ppd-candidates 3", "candidates=3 needs pipeline stages"),
        # Names of methods and models
        ("--speculative-model ./no-such-folder", "'./no-such-folder' does not exist"),
        (
            asked('{"method": "ppd", "model": "paradecode"}'),
            "model='paradecode' is a method name",
        ),
        (
            asked('{"method": "cp"}'),
            "method 'cp' needs heads; give model=DIR, .*ppd train cp",
        ),
        (
            asked('{"method": ["ppd"]}'),
            r"method=\['ppd'\] is not a name; give a string, such as 'ppd'",
        ),
        (asked('{"model": ["ppd"]}'), r"model=\['ppd'\] is not a name"),
        (asked('{"method": "PPD"}'), "unknown method 'PPD'; did you mean 'ppd'"),
        # Options that contradict each other
        (
            asked('{"method": "ppd", "exit_layer": 99}'),
            r"exit_layer=99 is outside 1\.\.5; this model has 6 layers",
        ),
        (
            f"{PPD} --ppd-exit-layer 4,2",
            "exit_layer=2,4 names several layers, of which a step can use one",
        ),
        (
            f"{PPD} --ppd-schedule parallel",
            "^--ppd-schedule was removed: leave it out; only the deferred",
        ),
        (
            "--ppd-gamma 0.5",
            "--ppd-gamma is an option of vllm-ppd; add --speculative-model",
        ),
        (
            asked("[1]"),
            r"speculative_config=\[1\] is not a JSON object; give one, such as",
        ),
        # Given twice
        (
            asked('{"method": "ppd", "gamma": 0.1}') + " --ppd-gamma 0.5",
            "mutually exclusive",
        ),
        (
            asked('{"method": "ppd", "exit-layer": 2, "exit_layer": 3}'),
            r"speculative_config\['exit-layer'\]=2 and "
            r"speculative_config\['exit_layer'\]=3 differ; give only one",
        ),
        (
            asked('{"method": "ppd", "exit-layer": 2}') + " --ppd-exit-layer 3",
            r"--ppd-exit-layer and --speculative-config\['exit-layer'\] are mutually exclusive",
        ),
        (
            asked('{"method": "ppd", "num_speculative_tokens": 2}')
            + " --spec-tokens 4",
            r"speculative_config\['num_speculative_tokens'\]=2 and --spec-tokens=4 differ",
        ),
        (
            asked('{"method": "ppd"}') + " --spec-method ngram",
            r"speculative_config\['method'\]='ppd' and --spec-method='ngram' differ; give only one",
        ),
        # Values of flags
        (
            f"{PPD} --ppd-adaptive 2",
            "--ppd-adaptive='2': Input should be a valid boolean",
        ),
    ],
)
def test_refused_before_the_model_loads(
    tiny_model: Factory, flags: str, message: str
) -> None:
    with refused(message):
        from_flags(tiny_model(), flags)


@pytest.mark.parametrize(
    ("family", "asked", "settings", "message"),
    [
        (
            "gpt_neox",
            {"method": "ppd"},
            {"pipeline_parallel_size": 2},
            "whose first pipeline stage cannot hold an LM head",
        ),
    ],
)
def test_families_that_cannot(
    tiny_model: Factory,
    family: str,
    asked: dict[str, Any],
    settings: dict[str, Any],
    message: str,
) -> None:
    with refused(message):
        from_dict(tiny_model(family), asked, **settings)


def test_unknown_family(tmp_path: Path) -> None:
    transformers.GPT2Config(
        vocab_size=320,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=128,
        architectures=["GPT2LMHeadModel"],
    ).save_pretrained(tmp_path)
    tiny.make_tokenizer().save_pretrained(tmp_path)
    with refused(
        r"GPT2LMHeadModel cannot be cut.*supported families: Llama, Mistral, .*; or use CP heads"
    ):
        from_dict(tmp_path, {"method": "ppd", "exit_layer": 1})
    # Heads that need no adapter are not asked for one.
    with refused("pipeline parallelism is not supported with method 'cp'"):
        from_dict(tmp_path, {"method": "cp", "model": "/any"}, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("fact", "message"),
    [
        (
            "use_mla",
            r"latent attention \(MLA\) is not supported with CP drafting on a CPU: "
            r".*operator for tokens",
        ),
        (
            "is_moe",
            r"data parallelism of mixture-of-experts models .* CP drafting: vLLM's "
            r"CPU build does not",
        ),
        (
            "is_encoder_decoder",
            "encoder-decoder models are not supported with CP drafting",
        ),
        ("is_diffusion", "diffusion models are not supported with CP drafting"),
        (
            "has_inner_state",
            r"recurrent state \(Mamba, gated delta nets\) .* CP drafting: .*keeps "
            r"rejected drafts in",
        ),
    ],
)
def test_targets_that_cannot_verify_drafts(
    tiny_model: Factory,
    whole_heads: Factory,
    monkeypatch: pytest.MonkeyPatch,
    fact: str,
    message: str,
) -> None:
    given = {"model": str(whole_heads("cp"))}
    settings = {"data_parallel_size": 2} if fact == "is_moe" else {}
    from_dict(tiny_model(), given, **settings)
    monkeypatch.setattr(ModelConfig, fact, property(lambda self: True))
    with refused(message):
        from_dict(tiny_model(), given, **settings)


@pytest.mark.parametrize(
    ("fact", "value", "message"),
    [
        (
            "architectures",
            ["GPT2LMHeadModel"],
            "family GPT2LMHeadModel cannot be cut .* use CP heads without --layers",
        ),
        (
            "is_multimodal_model",
            True,
            "multimodal models are not supported with heads that read layers 1, 4",
        ),
        (
            "using_transformers_backend",
            lambda: True,
            "family and heads that read layers 1, 4, .* leave out --model-impl",
        ),
    ],
)
def test_targets_that_cannot_give_the_states_of_layers(
    tiny_model: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fact: str,
    value: Any,
    message: str,
) -> None:
    heads = make_heads(
        tmp_path / "heads", "cp", tiny_model(), condition="recurrent", layers=(1, 4)
    )
    given = {"method": "cp", "model": str(heads)}
    from_dict(tiny_model(), given)
    monkeypatch.setattr(ModelConfig, fact, property(lambda self: value))
    with refused(message):
        from_dict(tiny_model(), given)


@pytest.mark.parametrize(
    ("kind", "given", "made", "message"),
    [
        (
            "cp",
            {"num_speculative_tokens": 3},
            {},
            "num_speculative_tokens=3 is more than the 2 drafts that the heads",
        ),
        (
            "cp",
            {"draft_vocab_size": 400},
            {},
            "draft_vocab_size=400 is more than the model's vocabulary of 320",
        ),
        (
            "dynamo",
            {"draft_vocab_size": 99, "verify": False},
            {},
            "as drafts are not verified; leave it out",
        ),
        (
            "dynamo",
            {"verify": False, "adaptive": True},
            {},
            "adaptive has no effect with verify: false",
        ),
        (
            "dynamo",
            {"verify": False, "draft_sample_method": "greedy"},
            {},
            "draft_sample_method has no effect with verify: false",
        ),
        (
            "dynamo",
            {"verify": False, "prompt_lookup_min": 2},
            {},
            "prompt_lookup_min=2 is not supported with verify",
        ),
        (
            "cp",
            {"method": "dynamo"},
            {},
            "holds heads of kind 'cp'; expected kind 'dynamo'",
        ),
        (
            "cp",
            {},
            {"num_hidden_layers": 7},
            "num_hidden_layers is 7 there, but 6 in this model",
        ),
    ],
)
def test_heads_that_do_not_fit(
    tiny_model: Factory,
    tmp_path: Path,
    kind: str,
    given: dict[str, Any],
    made: dict[str, int],
    message: str,
) -> None:
    folder = str(make_heads(tmp_path / "heads", kind, tiny_model(), made))
    with refused(message):
        from_dict(tiny_model(), {"model": folder, **given})


def test_exits_that_heads_do_not_have(
    tiny_model: Factory, heads_folder: Factory
) -> None:
    folder = str(heads_folder(exit_layers=(2, 4)))
    with refused(r"exit_layer=3 has no head in .*, which has heads for layers 2, 4"):
        from_dict(tiny_model(), {"exit_layer": 3, "model": folder})
    early = str(heads_folder(exit_layers=(2,)))
    with refused(r"have no exit in 3\.\.5, where a worker group's stages can be split"):
        from_dict(tiny_model(), {"model": early}, pipeline_parallel_size=2)
    with refused("hidden_size is 64 there, but 128 in this model"):
        from_dict(tiny_model("qwen2"), {"method": "ppd", "model": folder})


def test_worker_group_in_an_environment(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs.disable_envs_cache()  # an engine of a test before may have switched it on
    switch = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    if switch in envs.environment_variables:  # vLLM 0.33 has the newer executor alone
        monkeypatch.setenv(switch, "0")
        with refused("older Ray executor"):
            from_dict(
                tiny_model(),
                {"method": "ppd"},
                pipeline_parallel_size=2,
                distributed_executor_backend="ray",
            )
    monkeypatch.setenv(PARTITION, "4,2")
    with refused(
        "VLLM_PP_LAYER_PARTITION=4,2 is not the split of the worker group, 3,3"
    ):
        from_dict(tiny_model(), {"method": "ppd"}, pipeline_parallel_size=2)
    from_dict(
        tiny_model(), {"method": "ppd", "exit_layer": 4}, pipeline_parallel_size=2
    )


@pytest.mark.parametrize(
    "heads", [None, {}, {"condition": "recurrent", "positions": 3, "layers": [2, 4]}]
)
def test_graphs_that_vllm_turns_on_itself(
    tiny_model: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heads: dict[str, Any] | None,
) -> None:
    """With batch invariance and tuned tiles for a model; the first engine is refused, too."""
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    # Restored afterwards, as vLLM sets it
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "")
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH")
    monkeypatch.setattr(
        VllmConfig, "_uses_breakable_cudagraph_for_batch_invariance", lambda self: True
    )
    options: dict[str, Any] = {"method": "ppd", "exit_layer": 3}
    if heads is not None:
        options = {
            "model": str(make_heads(tmp_path / "heads", "cp", tiny_model(), **heads))
        }
    with refused(
        None
        if heads == {}
        else "breakable CUDA graphs are not supported with method '(ppd|cp)'"
    ):
        from_dict(tiny_model(), options, dtype="bfloat16")


@pytest.mark.parametrize(
    ("candidates", "rows", "message"),
    [
        (3, 24, None),
        (1, 2, None),
        (3, 16, "candidates=3 for 8 requests need --max-num-seqs 24, not 16; raise it"),
        (3, 4, "candidates=3 for 4 requests need --max-num-seqs 12, not 4"),
    ],
)
def test_more_candidates_than_a_gpu_has_room_for(
    monkeypatch: pytest.MonkeyPatch, candidates: int, rows: int, message: str | None
) -> None:
    config = resolve(parse_options({"candidates": candidates}), 6, stages=2)
    # A CPU's backend has no buffers of a row a candidate
    refuse_candidates(config, rows)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with refused(message):
        refuse_candidates(config, rows)


def test_machines_without_runner_v2(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"method": "lookup"}
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with refused(
        "^VLLM_USE_V2_MODEL_RUNNER=0 is not supported with vllm-ppd, .*; leave it out"
    ):
        from_dict(tiny_model(), given)
    for others in (
        None,
        {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
    ):
        from_dict(tiny_model(), others)  # vLLM's own
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    from_dict(tiny_model(), given)
    monkeypatch.setattr(platform, "is_cpu", lambda: False)
    monkeypatch.setattr(platform, "has_triton", lambda: False)
    with refused("needs Triton on a GPU, which vLLM did not find; install triton"):
        from_dict(tiny_model(), given)


def test_engine_arguments(tiny_model: Factory) -> None:
    def check(
        options: dict[str, Any], message: str | None = None, **settings: Any
    ) -> None:
        with refused(message):
            refuse_scheduling(
                resolve(parse_options(options), 12),
                EngineArgs(model=str(tiny_model()), **settings),
            )

    check({"method": "cp"}, async_scheduling=True)
    check(
        {"method": "cp"},
        "^--use-fp64-gumbel is not supported with sampled drafts",
        use_fp64_gumbel=True,
    )
    for not_drawn in ({"draft_sample_method": "greedy"}, {"method": "lookup"}):
        check({"method": "cp", **not_drawn}, use_fp64_gumbel=True)
