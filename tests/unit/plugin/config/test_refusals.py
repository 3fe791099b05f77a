# SPDX-License-Identifier: Apache-2.0
"""Refusals: each is one line that says what to do, before a model loads."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import transformers
from configured import from_dict, from_flags
from conftest import Factory
from heads_folders import make_heads
from vllm import envs
from vllm.config import ModelConfig, VllmConfig

from vllm_ppd.heads.errors import UserError
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.platform import PARTITION

PPD = "--speculative-model ppd"
EARLY = f"{PPD} --ppd-exit-layer 3"
GROUP = f"{PPD} --pipeline-parallel-size 2"
LAYER_BY_LAYER = (
    """'{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", """
    """"kv_connector_extra_config": {"use_layerwise": true}}'"""
)
RDMA = """'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'"""


@contextmanager
def refused(message: str) -> Iterator[None]:
    """A block that ends in a refusal of a single short line."""
    with pytest.raises(UserError, match=message) as refusal:
        yield
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) <= 300


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # What vLLM's settings rule out
        (f"{EARLY} --enable-lora", "LoRA .* is not supported"),
        (f"{PPD} --enable-prompt-embeds", "prompt embeddings"),
        (f"{PPD} --enable-trace-replay", "trace replay"),
        (
            f"{PPD} --pipeline-parallel-size 2 --logits-processors a:B",
            "custom logits processors .* a worker group",
        ),
        (f"{PPD} --worker-cls a.B", "worker class 'a.B' cannot be combined"),
        (
            f"{EARLY} --kv-transfer-config {LAYER_BY_LAYER}",
            "moves KV layer by layer",
        ),
        (f"{EARLY} --kv-transfer-config {RDMA}", "memory from outside"),
        (f"{EARLY} --enable-return-routed-experts", "not every layer runs"),
        (f"{GROUP} --return-sampling-mask", "emit several tokens"),
        (f"{EARLY} --model-impl transformers", "not supported with this family"),
        (
            f"""{PPD} --watermark-config '{{"algorithm": "gumbelmax", "key": 1}}'""",
            "watermarking",
        ),
        (
            f"{EARLY} --prefill-context-parallel-size 2",
            "prefill context parallelism",
        ),
        (
            f"{EARLY} --use-fp64-gumbel",
            "^--use-fp64-gumbel is not supported with sampled drafts",
        ),
        # The worker group
        (
            "--speculative-model paradecode --pipeline-parallel-size 2",
            "not supported with method 'early'; use method 'group'",
        ),
        (f"{PPD} --pipeline-parallel-size 3", "has 2 pipeline stages, not 3"),
        ("--spec-method group", "has 2 pipeline stages, not 1"),
        (f"{GROUP} --kv-offloading-size 1", "KV offloading .* a worker group"),
        (
            f"{GROUP} --ppd-gamma 0.5",
            "of method early; remove it with method 'group'",
        ),
        (
            f"{GROUP} --ppd-exit-layer 2",
            r"exit_layer=2 cannot split .* in 3\.\.5",
        ),
        (
            f"{GROUP} --ppd-exit-layer 3,4",
            r"exit_layer=\[3, 4\] cannot split .*; set one layer in 3\.\.5",
        ),
        (
            f"{PPD} --ppd-exit-layer 2,6",
            r"exit_layer=\[2, 6\] is outside 1\.\.5",
        ),
        (
            f"{PPD} --ppd-exit-layer 2,4 --ppd-adaptive false",
            r"exit_layer=\[2, 4\] needs adaptive, .* set one layer",
        ),
        (
            f"{GROUP} --ppd-prompt-lookup-min 2",
            "prompt_lookup_min=2 is not supported",
        ),
        (f"{PPD} --ppd-prompt-lookup-min 0", "allows no drafts without heads"),
        (f"{GROUP} --ppd-adaptive true", "adaptive has no effect with pipeline"),
        (
            f"{GROUP} --ppd-draft-sample-method greedy",
            "draft_sample_method has no effect with pipeline parallelism",
        ),
        (
            f"{GROUP} --scheduler-cls a.B",
            "--scheduler-cls a.B cannot be combined",
        ),
        (f"{GROUP} --async-scheduling", "--async-scheduling is not supported"),
        (f"{GROUP} --data-parallel-size 2", "data parallelism is not supported"),
        (f"{PPD} --ppd-candidates 3", "has 2 pipeline stages, not 1"),
        # Names of methods and models
        (
            "--speculative-model ./no-such-folder",
            "'./no-such-folder' does not exist",
        ),
        (
            "--spec-method ppd --spec-model paradecode",
            "'paradecode' is a method name",
        ),
        ("--spec-method cp", "method 'cp' needs heads; .*ppd train cp"),
        ("""-sc '{"method": ["ppd"]}'""", "must be a valid string"),
        (
            """-sc '{"method": "PPD"}'""",
            "unknown method 'PPD'; did you mean 'ppd'",
        ),
        # Flags, and options that are given twice
        (
            f"{PPD} --ppd-adaptive 2",
            "--ppd-adaptive='2': must be a valid bool",
        ),
        ("--ppd-gamma 0.5", "option of vllm-ppd; add --speculative-model"),
        ("-sc [1]", r"speculative_config=\[1\] is not a JSON object; set one"),
        (
            """-sc '{"method": "ppd", "exit-layer": 2}' --ppd-exit-layer 3""",
            r"--ppd-exit-layer and --speculative-config\['exit_layer'\] are mutually",
        ),
        (
            """-sc '{"method": "ppd", "exit-layer": 2, "exit_layer": 3}'""",
            r"\['exit-layer'\]=2 and speculative_config\['exit_layer'\]=3 differ",
        ),
        (
            """-sc '{"method": "ppd"}' --spec-method ngram""",
            r"\['method'\]='ppd' and --spec-method='ngram' differ; set only one",
        ),
    ],
)
def test_refused_before_the_model_loads(
    tiny_model: Factory, flags: str, message: str
) -> None:
    with refused(message):
        from_flags(tiny_model(), flags)


def test_families_that_cannot_be_cut(tiny_model: Factory, tmp_path: Path) -> None:
    with refused("whose first pipeline stage cannot hold an LM head"):
        from_dict(
            tiny_model("gpt_neox"), {"method": "ppd"}, pipeline_parallel_size=2
        )
    for family in ("gpt_neox", "granite"):
        with refused("use early or CP heads"):
            from_dict(tiny_model(family), {"method": "dynamo", "model": "/any"})
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
        "GPT2LMHeadModel cannot be cut.*supported families: Llama, Mistral"
    ):
        from_dict(tmp_path, {"method": "ppd", "exit_layer": 1})
    # Heads that need no adapter are not asked for one.
    with refused("pipeline parallelism is not supported with method 'cp'"):
        from_dict(
            tmp_path, {"method": "cp", "model": "/any"}, pipeline_parallel_size=2
        )


LAYERS = {"condition": "recurrent", "layers": (1, 4)}


@pytest.mark.parametrize(
    ("made", "fact", "value", "message"),
    [
        # Targets that cannot verify drafts
        (
            {},
            "use_mla",
            True,
            r"latent attention \(MLA\) .* CP drafting on a CPU",
        ),
        (
            {},
            "is_moe",
            True,
            "data parallelism of mixture-of-experts models .* CP drafting",
        ),
        (
            {},
            "is_encoder_decoder",
            True,
            "encoder-decoder models .* CP drafting",
        ),
        (
            {},
            "is_diffusion",
            True,
            "diffusion models are not supported with CP drafting",
        ),
        (
            {},
            "has_inner_state",
            True,
            r"recurrent state \(Mamba, gated delta nets\) .* CP",
        ),
        # Targets that cannot give the states of layers
        (
            LAYERS,
            "architectures",
            ["GPT2LMHeadModel"],
            "use CP heads without --layers",
        ),
        (
            LAYERS,
            "is_multimodal_model",
            True,
            "multimodal models .* that read layers 1, 4",
        ),
        (
            LAYERS,
            "using_transformers_backend",
            lambda: True,
            "heads that read layers 1, 4, .* remove --model-impl",
        ),
    ],
)
def test_targets_of_other_kinds(
    tiny_model: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: dict[str, Any],
    fact: str,
    value: Any,
    message: str,
) -> None:
    heads = make_heads(tmp_path / "heads", "cp", tiny_model(), **made)
    given = {"method": "cp", "model": str(heads)}
    settings = {"data_parallel_size": 2} if fact == "is_moe" else {}
    from_dict(tiny_model(), given, **settings)
    monkeypatch.setattr(ModelConfig, fact, property(lambda self: value))
    with refused(message):
        from_dict(tiny_model(), given, **settings)


UNVERIFIED = {"verify": False}


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (
            "cp",
            {"num_speculative_tokens": 3},
            "is more than the 2 drafts that the",
        ),
        (
            "cp",
            {"draft_vocab_size": 400},
            "more than the model's vocabulary of 320",
        ),
        (
            "cp",
            {"method": "dynamo"},
            "heads of kind 'cp'; expected kind 'dynamo'",
        ),
        (
            "cp",
            {
                "method": "ppd",
                "model": None,
                "exit_layer": 3,
                "draft_vocab_size": 64,
            },
            "needs heads, whose token counts choose the tokens",
        ),
        (
            "dynamo",
            UNVERIFIED | {"draft_vocab_size": 99},
            "drafts are not verified",
        ),
        (
            "dynamo",
            UNVERIFIED | {"adaptive": True},
            "no effect with verify: false",
        ),
    ],
)
def test_options_that_do_not_fit_heads(
    tiny_model: Factory,
    whole_heads: Factory,
    kind: str,
    given: dict[str, Any],
    message: str,
) -> None:
    with refused(message):
        from_dict(tiny_model(), {"model": str(whole_heads(kind)), **given})


def test_heads_of_another_target_or_exit(
    tiny_model: Factory, heads_folder: Factory
) -> None:
    folder = str(heads_folder(exit_layers=(2, 4)))
    with refused(
        "exit_layer=3 has no head in .*, which has heads for layers 2, 4"
    ):
        from_dict(tiny_model(), {"exit_layer": [2, 3], "model": folder})
    early = str(heads_folder(exit_layers=(2,)))
    with refused(
        r"have no exit in 3\.\.5, where a worker group's stages can be split"
    ):
        from_dict(tiny_model(), {"model": early}, pipeline_parallel_size=2)
    with refused("hidden_size is 64 there, but 128 in this model"):
        from_dict(tiny_model("qwen2"), {"method": "ppd", "model": folder})


def test_worker_group_in_an_environment(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs.disable_envs_cache()  # an engine of a test before may have switched it on
    switch = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    if (
        switch in envs.environment_variables
    ):  # vLLM 0.33 has the newer executor alone
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
    given = {"method": "ppd", "exit_layer": 4}
    from_dict(tiny_model(), given, pipeline_parallel_size=2)


@pytest.mark.parametrize("made", [{}, LAYERS])
def test_graphs_that_vllm_turns_on_itself(
    tiny_model: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: dict[str, Any],
) -> None:
    """With batch invariance and tuned tiles for a model; the first engine is refused, too."""
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    # Restored afterwards, as vLLM sets it
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "")
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH")
    monkeypatch.setattr(
        VllmConfig,
        "_uses_breakable_cudagraph_for_batch_invariance",
        lambda self: True,
    )
    heads = make_heads(
        tmp_path / "heads",
        "cp",
        tiny_model(),
        **made,
    )
    with refused("breakable CUDA graphs") if made else nullcontext():
        from_dict(tiny_model(), {"model": str(heads)}, dtype="bfloat16")


def test_machines_without_runner_v2(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"method": "lookup"}
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with refused("^VLLM_USE_V2_MODEL_RUNNER=0 is not supported with vllm-ppd"):
        from_dict(tiny_model(), given)
    from_dict(tiny_model(), None)  # vLLM's own
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    from_dict(tiny_model(), given, use_fp64_gumbel=True)  # lookups draw nothing
    monkeypatch.setattr(platform, "is_cpu", lambda: False)
    with refused(
        "needs Triton on a GPU, which vLLM did not find; install triton"
    ):
        from_dict(tiny_model(), given)
