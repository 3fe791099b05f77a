# SPDX-License-Identifier: Apache-2.0
"""Options: every way in gives the same configuration, and each mistake is one line that says what to do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from heads_folders import blank_tensors, config_of
from vllm import EngineArgs
from vllm.config import ModelConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_ppd.heads.io import HeadsError, save_heads
from vllm_ppd.heads.quote import quoted, shortened
from vllm_ppd.vllm_plugins import register
from vllm_ppd.vllm_plugins.config.activation import active_config
from vllm_ppd.vllm_plugins.config.options import (
    DraftingOptions,
    OptionError,
    flag_fields,
    flag_name,
    methods_of,
    parse_options,
)
from vllm_ppd.vllm_plugins.config.resolve import resolve
from vllm_ppd.vllm_plugins.config.resolved import WORKERS, DraftingConfig
from vllm_ppd.vllm_plugins.registry import METHODS

register()
LAYER_BY_LAYER = (
    '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": {"use_layerwise": true}}'
)
Model = Callable[..., Path]


def from_flags(model: Path, *flags: str) -> Any:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", str(model), "--dtype", "float32", *flags])
    return EngineArgs.from_cli_args(args).create_engine_config()


def from_dict(model: Path, speculative_config: dict[str, Any] | None, **settings: Any) -> Any:
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, **settings}
    return EngineArgs(model=str(model), speculative_config=speculative_config, **settings).create_engine_config()


def options(vllm_config: Any) -> dict[str, Any]:
    config = active_config(vllm_config)
    assert config is not None
    return config.model_dump()


def test_ways_in_are_the_same(tiny_model: Model) -> None:
    model = tiny_model()
    first = options(from_flags(model, "--speculative-model", "ppd"))
    assert first["exit_layer"] == (3,)
    for flags in (
        ["--spec-model", "ppd"],
        ["--spec-method", "ppd"],
        ["-sc", '{"method": "ppd"}'],
        ["--speculative-config", '{"model": "ppd"}'],
        ["--speculative-config.method", "ppd"],
    ):
        assert options(from_flags(model, *flags)) == first
    assert options(from_dict(model, {"method": "ppd"})) == first


def test_flags_carry_every_option(tiny_model: Model) -> None:
    config = from_flags(
        tiny_model(), "--speculative-model", "paradecode", "--spec-tokens", "5", "--ppd-exit-layer", "2,4",
        "--ppd-gamma", "0.4", "--ppd-draft-sample-method", "greedy", "--ppd-max-drafting-requests", "3",
        "--ppd-disable-by-batch-size", "9", "--ppd-adaptive", "false", "--ppd-prompt-lookup-min", "4",
        "--ppd-prompt-lookup-drafts", "7", "--ppd-step-costs", "measure",
    )  # fmt: skip
    assert options(config) == {
        "method": "paradecode", "model": None, "num_speculative_tokens": 5, "exit_layer": (2, 4), "gamma": 0.4,
        "draft_sample_method": "greedy", "max_drafting_requests": 3, "disable_by_batch_size": 9, "num_layers": 6,
        "eps_b": None, "verify": True, "heads_summary": "", "draft_vocab_size": None, "candidates": 1, "stages": 1,
        "adaptive": False, "prompt_lookup_min": 4, "prompt_lookup_drafts": 7,
        "schedule": "deferred", "step_costs": "measure", "runner": "v1", "v1_because": None,
        "drafts_by_batch_size": [],
    }  # fmt: skip
    assert config.speculative_config.num_speculative_tokens == 7  # of whichever source
    assert config.num_lookahead_tokens == 6
    assert config.parallel_config.worker_cls == WORKERS["v1"]


def test_heads_folder_gives_method_and_defaults(tiny_model: Model, heads_folder: Model) -> None:
    folder = str(heads_folder(exit_layers=(2, 4)))
    for config in (
        from_flags(tiny_model(), "--speculative-model", folder),
        from_dict(tiny_model(), {"method": "ppd", "model": folder}),
        from_flags(Path(folder)),  # `vllm serve HEADS`: the folder names its target
    ):
        got = options(config)
        assert (got["method"], got["model"]) == ("ppd", folder)
        assert (got["exit_layer"], got["num_speculative_tokens"]) == ((2, 4), 2)
        assert config.model_config.model == str(tiny_model())
    one = options(from_dict(tiny_model(), {"method": "ppd", "model": folder, "exit_layer": 4}))
    assert one["exit_layer"] == (4,)


def test_option_spellings() -> None:
    for value in (4, "4", [4], (4,), ["4", 4]):
        assert parse_options({"exit_layer": value}).exit_layer == (4,)
    assert parse_options({"exit_layer": "8, 4"}).exit_layer == (4, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exit_layr": 3}, "unknown option 'exit_layr'; did you mean 'exit_layer'"),
        ({"num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({"zzz": 3}, "unknown option 'zzz'; known options: method, model"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0: Input should be greater than or equal to 1"),
        ({"num_speculative_tokens": -2}, "num_speculative_tokens=-2: Input should be greater"),
        ({"gamma": 1.5}, "gamma=1.5: Input should be less than 1"),
        ({"gamma": "much"}, "gamma='much'"),
        ({"exit_layer": 0}, "layers count from 1"),
        ({"exit_layer": "three"}, "exit_layer='three': must be a layer number"),
        ({"exit_layer": 2.5}, "exit_layer=2.5: must be a layer number"),
        ({"exit_layer": []}, "layers count from 1"),
        ({"max_drafting_requests": 0}, "max_drafting_requests=0"),
        ({"eps_b": 0.5}, "eps_b belongs to method dynamo; leave it out with method 'ppd'"),
        ({"verify": False}, "verify belongs to method dynamo"),
        ({"method": "cp", "exit_layer": 3}, "exit_layer belongs to method ppd and paradecode; leave it out"),
        ({"schedule": "parallel"}, "schedule belongs to method paradecode; leave it out with method 'ppd'"),
        ({"method": "paradecode", "schedule": "both"}, "schedule='both': Input should be 'deferred' or 'parallel'"),
        ({"method": "dynamo", "gamma": 0.1}, "gamma belongs to method ppd and paradecode"),
        ({"method": "dynamo", "eps_b": 1.5}, "eps_b=1.5: Input should be less than or equal to 1"),
        ({"method": "medusa"}, "method='medusa': must be one of ppd, paradecode, cp, dynamo"),
        ({"draft_sample_method": "beam"}, "draft_sample_method='beam': Input should be 'greedy' or 'probabilistic'"),
        ({"exit_layer": [3, 4.5]}, r"exit_layer=\[3, 4.5\]: must be a layer number"),
        ({"exit_layer": [True, 6]}, r"exit_layer=\[True, 6\]: must be a layer number"),
        ({"exit_layer": True}, "exit_layer=True: must be a layer number"),
        ({"exit_layer": {"4": 1}}, "exit_layer={'4': 1}: must be a layer number"),
        ({"exit_layer": [[3]]}, r"exit_layer=\[\[3\]\]: must be a layer number"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True: Input should be a valid integer"),
        ({"num_speculative_tokens": 3.0}, "num_speculative_tokens=3.0: Input should be a valid integer"),
        ({"num_speculative_tokens": "3"}, "num_speculative_tokens='3': Input should be a valid integer"),
        ({"adaptive": 1}, "adaptive=1: Input should be a valid boolean"),
        ({"adaptive": "false"}, "adaptive='false': Input should be a valid boolean"),
        ({"gamma": True}, "gamma=True: Input should be a valid number"),
        ({"gamma": float("nan")}, "gamma=nan: Input should be a finite number"),
        ({"method": ["ppd"]}, r"method=\['ppd'\]: Input should be a valid string"),
        ({"model": ["heads"]}, r"model=\['heads'\]: Input should be a valid string"),
        ({"disable_by_batch_size": 10**5000}, "disable_by_batch_size=<int>: Input should be less than"),
    ],
)
def test_bad_options(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        parse_options({"method": "ppd", **given})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [{"gamma": "x" * 10**6}, {"y" * 10**6: 1}, {"exit_layer": ["z\n" * 10**5]}])
def test_messages_are_short(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"(x{50}\.\.\.x{20}|y{50}\.\.\.y{20}|z\\n)") as caught:
        parse_options(given)
    assert len(str(caught.value)) <= 300
    assert "\n" not in str(caught.value)


def test_quoted_values() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise KeyError

    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (
        "x" * 10**6,
        b"x" * 10**6,
        list(range(10**5)),
        {i: i for i in range(10**5)},
        deep,
        10**5000,
        Broken(),
    ):
        assert len(quoted(value)) <= 80
    assert quoted("a  b\n\ud800") == repr("a  b\n\ud800")
    assert quoted([1, "2", None, True, 0.5]) == "[1, '2', None, True, 0.5]"
    assert shortened("a \n b") == "a b"
    assert shortened("ab" * 100, 20) == "abababababa...ababab"


def test_adaptive_is_for_verified_drafts() -> None:
    assert resolve(parse_options({}), 6).adaptive
    assert "up to 3 drafts" in resolve(parse_options({}), 6).summary()
    assert not resolve(parse_options({"adaptive": False}), 6).adaptive
    assert not resolve(parse_options({}), 6, stages=2).adaptive
    assert not resolve(parse_options({"adaptive": False}), 6, stages=2).adaptive
    with pytest.raises(OptionError, match="adaptive is of no use with pipeline parallelism: no token is drafted"):
        resolve(parse_options({"adaptive": True}), 6, stages=2)
    assert not resolve(parse_options({"method": "dynamo", "verify": False}), 6).adaptive


@pytest.mark.parametrize(
    ("options", "stages", "named"),
    [
        ({}, 2, "pipeline parallelism"),
        ({"method": "dynamo", "verify": False}, 1, "verify: false"),
        ({"method": "paradecode", "schedule": "parallel"}, 1, "schedule: parallel"),
    ],
)
def test_lookup_needs_drafts_of_several_sources(options: dict[str, Any], stages: int, named: str) -> None:
    with pytest.raises(OptionError, match=f"prompt_lookup_min=2 is not supported with {named}"):
        resolve(parse_options({**options, "prompt_lookup_min": 2}), 6, stages=stages)
    config = resolve(parse_options({"prompt_lookup_min": 2}), 6)
    assert "prompt lookup from 2 tokens on (up to 3 drafts)" in config.summary()
    assert config.max_drafts == 3
    with pytest.raises(OptionError, match="prompt_lookup_drafts=5 needs prompt_lookup_min"):
        resolve(parse_options({"prompt_lookup_drafts": 5}), 6)
    with pytest.raises(OptionError, match="adaptive is of no use with verify: false"):
        resolve(parse_options({"method": "dynamo", "verify": False, "adaptive": True}), 6)
    with pytest.raises(OptionError, match="draft_sample_method is of no use with verify: false"):
        resolve(parse_options({"method": "dynamo", "verify": False, "draft_sample_method": "greedy"}), 6)
    with pytest.raises(OptionError, match="draft_sample_method is of no use with pipeline parallelism"):
        resolve(parse_options({"draft_sample_method": "greedy"}), 6, stages=2)
    with pytest.raises(OptionError, match=r"prompt_lookup_min.*32"):
        parse_options({"prompt_lookup_min": 33})


@pytest.mark.parametrize("layer", [6, 7, 100])
def test_exit_outside_the_model(layer: int) -> None:
    with pytest.raises(OptionError, match=rf"exit_layer={layer} is outside 1\.\.5; this model has 6 layers"):
        resolve(parse_options({"exit_layer": layer}), 6)


def test_exit_without_a_head(tiny_model: Model, heads_folder: Model) -> None:
    folder = str(heads_folder(exit_layers=(2, 4)))
    with pytest.raises(OptionError, match=r"exit_layer=3 has no head in .*, which has heads for layers 2, 4"):
        from_dict(tiny_model(), {"exit_layer": 3, "model": folder})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--speculative-model", "paradecode", "--pipeline-parallel-size", "2"],
            "pipeline parallelism is not supported",
        ),
        (
            ["--speculative-model", "paradecode", "--ppd-schedule", "parallel", "--tensor-parallel-size", "2"],
            "tensor parallelism is not supported with schedule 'parallel'; use 'deferred'",
        ),
        (["--speculative-model", "ppd", "--enable-lora"], "LoRA .* is not supported"),
        (["--speculative-model", "ppd", "--enable-prompt-embeds"], "prompt embeddings"),
        (["--speculative-model", "ppd", "--async-scheduling"], "--async-scheduling is not supported"),
        (["--speculative-model", "ppd", "--logits-processors", "a:B"], "custom logits processors are not supported"),
        (["--speculative-model", "ppd", "--worker-cls", "a.B"], "worker class 'a.B' cannot be combined"),
        (
            ["--speculative-model", "ppd", "--pipeline-parallel-size", "2", "--kv-offloading-size", "1"],
            r"KV offloading .* is not supported with a worker group",
        ),
        (
            ["--speculative-model", "ppd", "--kv-transfer-config", LAYER_BY_LAYER],
            "this KV connector moves KV a layer at a time, which is not supported with early drafting",
        ),
        (
            ["--speculative-model", "ppd", "--model-impl", "transformers"],
            "Transformers backend; leave out --model-impl",
        ),
        (["--speculative-model", "./no-such-folder"], "'./no-such-folder' does not exist"),
        (["--speculative-model", "ppd", "-sc", '{"exit_layer": 99}'], "exit_layer=99 is outside 1..5"),
        (["--ppd-gamma", "0.5"], "--ppd-gamma belongs to vllm-ppd; it needs --speculative-model"),
        (["--ppd-gamma", "0.5", "-sc", '{"method": "ppd", "gamma": 0.1}'], "mutually exclusive"),
        (["-sc", '{"method": "ppd", "model": "paradecode"}'], "model='paradecode' is a method name"),
        (["-sc", '{"method": "cp"}'], "method 'cp' drafts with heads; give model=DIR, .*ppd train cp"),
        (["--speculative-model", "dynamo"], "method 'dynamo' drafts with heads"),
        (["-sc", '{"method": "ppd", "model": "/no/heads"}'], "heads folder '/no/heads' does not exist"),
        (["-sc", '{"method": ["ppd"]}'], r"method=\['ppd'\] is not a name; give a string, such as 'ppd'"),
        (["-sc", '{"method": {"ppd": 1}}'], "method={'ppd': 1} is not a name"),
        (["-sc", '{"model": ["ppd"]}'], r"model=\['ppd'\] is not a name"),
        (["-sc", '{"method": "ppd", "exit_layr": null}'], "unknown option 'exit_layr'; did you mean 'exit_layer'"),
        (["-sc", '{"method": "PPD"}'], "unknown method 'PPD'; did you mean 'ppd'"),
        (["-sc", '{"method": "paradecod"}'], "unknown method 'paradecod'; did you mean 'paradecode'"),
        (["-sc", "[1]"], r"speculative_config=\[1\] is not a JSON object; give one, such as"),
        (["-sc", '"ppd"'], "speculative_config='ppd' is not a JSON object"),
        (["-sc", "[1]", "--ppd-gamma", "0.5"], r"speculative_config=\[1\] is not a JSON object"),
        (
            ["-sc", '{"method": "ppd", "exit-layer": 2, "exit_layer": 3}'],
            r"speculative_config\['exit-layer'\]=2 and speculative_config\['exit_layer'\]=3 differ; give one of them",
        ),
        (
            ["-sc", '{"method": "ppd", "exit-layer": 2}', "--ppd-exit-layer", "3"],
            r"--ppd-exit-layer and --speculative-config\['exit-layer'\] are mutually exclusive",
        ),
        (
            ["-sc", '{"method": "ppd", "num_speculative_tokens": 2}', "--spec-tokens", "4"],
            r"speculative_config\['num_speculative_tokens'\]=2 and --spec-tokens=4 differ",
        ),
        (
            ["-sc", '{"method": "ppd"}', "--spec-method", "ngram"],
            r"speculative_config\['method'\]='ppd' and --spec-method='ngram' differ; give one",
        ),
        (["--speculative-model", "ppd", "--ppd-gamma", "much"], "--ppd-gamma='much': Input should be a valid number"),
        (["--speculative-model", "ppd", "--ppd-adaptive", "2"], "--ppd-adaptive='2': Input should be a valid boolean"),
        (["--speculative-model", "ppd", "--ppd-exit-layer", "3.5"], "--ppd-exit-layer='3.5': must be a layer number"),
    ],
)
def test_refused_before_the_model_loads(tiny_model: Model, flags: list[str], message: str) -> None:
    with pytest.raises((OptionError, HeadsError), match=message) as caught:
        from_flags(tiny_model(), *flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flags", [["--ppd-gamma", "much"], ["-sc", '{"gamma": "0.5"}']])
def test_a_refusal_ends_a_process_with_its_one_line(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    """Also a flag's, which is read before vLLM asks for a speculative configuration."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(OptionError) as caught:
        from_flags(tiny_model(), "--speculative-model", "ppd", *flags)
    capsys.readouterr()  # the tiny model may have been written just now
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(OptionError, caught.value, None)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"vllm-ppd: error: {caught.value}\n"


def test_the_same_value_twice_is_no_conflict(tiny_model: Model) -> None:
    given = ["-sc", '{"method": "ppd", "num-speculative-tokens": 2}']
    once = options(from_flags(tiny_model(), *given))
    assert options(from_flags(tiny_model(), *given, "--spec-method", "ppd", "--spec-tokens", "2")) == once
    assert once["num_speculative_tokens"] == 2


def test_vllms_own_methods_keep_their_options(tiny_model: Model) -> None:
    """Some of ours are called as vLLM's are."""
    lookup = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    config = from_dict(tiny_model(), lookup)
    assert active_config(config) is None
    found = config.speculative_config
    assert (found.method, found.prompt_lookup_min, found.prompt_lookup_max) == ("ngram", 2, 4)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("cp", {"num_speculative_tokens": 4}, r"num_speculative_tokens=4 is more than the 3 drafts that the heads in"),
        ("dynamo", {"num_speculative_tokens": 3}, r"num_speculative_tokens=3 is more than the 2 drafts"),
        ("cp", {"draft_vocab_size": 400}, r"draft_vocab_size=400 is more than the model's vocabulary of 320"),
        ("dynamo", {"draft_vocab_size": 99, "verify": False}, "unverified drafts are the output; leave it out"),
        ("cp", {"method": "dynamo"}, r"holds heads of kind 'cp'; expected kind 'dynamo'"),
        ("dynamo", {"method": "ppd"}, r"holds heads of kind 'dynamo'; expected kind 'early'"),
    ],
)
def test_heads_that_cannot_do_what_is_asked(
    tiny_model: Model, tmp_path: Path, kind: str, given: dict[str, Any], message: str
) -> None:
    folder = blank_heads(tmp_path, tiny_model(), kind)
    with pytest.raises((OptionError, HeadsError), match=message) as caught:
        from_dict(tiny_model(), {"model": folder, **given})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["cp", "dynamo"])
def test_heads_recommend_a_draft_vocabulary(tiny_model: Model, tmp_path: Path, kind: str) -> None:
    folder = blank_heads(tmp_path, tiny_model(), kind, draft_vocab_size=128)
    for given, expected in (({}, 128), ({"draft_vocab_size": 64}, 64), ({"draft_vocab_size": 320}, None)):
        assert options(from_dict(tiny_model(), {"model": folder, **given}))["draft_vocab_size"] == expected
    if kind == "dynamo":  # unverified drafts are the output: all of the vocabulary
        assert options(from_dict(tiny_model(), {"model": folder, "verify": False}))["draft_vocab_size"] is None
    with pytest.raises(ValueError, match="draft_vocab_size is more than the vocabulary of 320"):
        blank_heads(tmp_path / "more", tiny_model(), kind, draft_vocab_size=321)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("cp", {"num_hidden_layers": 7}, "num_hidden_layers is 7 there and 6 in this model"),
        ("dynamo", {"num_hidden_layers": 5}, "num_hidden_layers is 5 there and 6 in this model"),
        ("dynamo", {"vocab_size": 300}, "vocab_size is 300 there and 320 in this model"),
    ],
)
def test_heads_of_another_size(
    tiny_model: Model, tmp_path: Path, kind: str, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(HeadsError, match=message):
        from_dict(tiny_model(), {"model": blank_heads(tmp_path, tiny_model(), kind, **changes)})


def test_cooccurrence_table_of_another_vocabulary(tiny_model: Model, tmp_path: Path) -> None:
    """The configuration is of this model, and the table in the weights is not."""
    folder = blank_heads(tmp_path, tiny_model(), "dynamo", table=300)
    with pytest.raises(HeadsError, match=r"tensor 'cooccurrence.unigram' has shape \[300\], expected \[320\]"):
        from_dict(tiny_model(), {"model": folder})


def blank_heads(
    folder: Path, model: Path, kind: str, table: int | None = None, draft_vocab_size: int | None = None, **sizes: int
) -> str:
    """A heads folder whose weights are zeros."""
    config = config_of(
        kind, model, sizes, draft_vocab_size=draft_vocab_size, **{"positions": 4} if kind == "cp" else {}
    )
    tensors = blank_tensors(config)
    if table is not None:
        tensors["cooccurrence.unigram"] = torch.ones(table).int()
    save_heads(folder / kind, config, tensors)
    return str(folder / kind)


def test_heads_of_another_model(tiny_model: Model, heads_folder: Model) -> None:
    with pytest.raises(HeadsError, match="hidden_size is 64 there and 128 in this model"):
        from_dict(tiny_model("qwen2"), {"method": "ppd", "model": str(heads_folder())})


def test_schedule(tiny_model: Model) -> None:
    config = active_config(from_dict(tiny_model(), {"method": "paradecode", "schedule": "parallel"}))
    assert config is not None and config.proposer.endswith("ParallelProposer")
    assert "gamma 0, parallel schedule" in config.summary()
    for family, changes, message in (
        ("gemma3", {}, "Gemma3ForCausalLM is not supported with schedule 'parallel'; use 'deferred'; it runs LlamaFor"),
        ("llama", {"quantization": "fp8"}, r"quantised weights \(fp8.*\) are not supported with schedule 'parallel'"),
    ):
        with pytest.raises(OptionError, match=message):
            from_dict(tiny_model(family), {"method": "paradecode", "schedule": "parallel"}, **changes)


def test_unsupported_family(tmp_path: Path) -> None:
    import tiny
    import transformers as tf

    folder = tmp_path / "gpt2"
    config = tf.GPT2Config(
        vocab_size=320, n_embd=64, n_layer=2, n_head=2, n_positions=128, architectures=["GPT2LMHeadModel"]
    )
    config.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    with pytest.raises(OptionError, match=r"GPT2LMHeadModel cannot be cut.*supported families: Llama, Mistral"):
        from_dict(folder, {"method": "ppd"})
    # Heads that need no adapter are not asked for one.
    with pytest.raises(OptionError, match="pipeline parallelism is not supported with method 'cp'"):
        from_dict(folder, {"method": "cp", "model": "/any"}, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "use_mla",
            r"latent attention \(MLA\) is not supported with CP drafting on a CPU: .*operator for tokens behind cached",
        ),
        ("is_moe", r"data parallelism of mixture-of-experts models .* CP drafting: vLLM's CPU build has none"),
        (
            "has_inner_state",
            r"recurrent state \(Mamba, gated delta nets\) .* CP drafting: .*keeps rejected drafts in it",
        ),
    ],
)
def test_targets_that_cannot_verify_drafts(
    tiny_model: Model, whole_heads: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    given = {"model": str(whole_heads("cp"))}
    settings = {"data_parallel_size": 2} if what == "is_moe" else {}
    from_dict(tiny_model(), given, **settings)
    monkeypatch.setattr(ModelConfig, what, property(lambda self: True))
    with pytest.raises(OptionError, match=message) as caught:
        from_dict(tiny_model(), given, **settings)
    assert len(str(caught.value)) <= 300


def test_flags_and_table_come_from_the_model() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    help_text = " ".join(parser._option_string_actions)
    for name in flag_fields():
        assert f"--ppd-{name.replace('_', '-')}" in help_text
    lines = ["| option | flag | methods | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, field in DraftingOptions.model_fields.items():
        by_itself = field.default is None and "(default:" in (field.description or "")
        default = "see there" if by_itself else "none" if field.default is None else field.default
        methods = "all" if methods_of(name) == list(METHODS) else ", ".join(methods_of(name))
        lines.append(f"| `{name}` | `{flag_name(name)}` | {methods} | {default} | {field.description} |")
    assert "\n".join(lines) in (ROOT / "docs" / "serving.md").read_text()


def test_flags_are_added_once() -> None:
    from vllm_ppd.vllm_plugins.config.flags import add_flags

    parser = argparse.ArgumentParser()
    actions = len(add_flags(parser)._actions)
    assert len(add_flags(parser)._actions) == actions


def test_summary_names_what_drafts() -> None:
    config = DraftingConfig(exit_layer=(3,), num_layers=12, model="/heads", max_drafting_requests=8)
    line = config.summary()
    for part in ("method ppd", "exit layer 3 of 12", "heads /heads", "3 drafts", "soft first 8 requests", "hard none"):
        assert part in line
    assert "\n" not in line
