# SPDX-License-Identifier: Apache-2.0
"""What the patches and overrides assume of vLLM, and that a vLLM that does not ask for
us is not touched.
"""

import json
from argparse import ArgumentParser
from importlib.metadata import entry_points
from typing import Any, get_args

import pytest
import torch
from cases import generate, greedy, prompts
from configured import from_dict
from conftest import Factory, our_log, run_script
from vllm import EngineArgs, SamplingParams
from vllm.config import vllm as vllm_module
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform

from vllm_ppd.vllm_plugins import register
from vllm_ppd.vllm_plugins.config.options import OptionError
from vllm_ppd.vllm_plugins.engine.cpu.native import mend_workers_to_come
from vllm_ppd.vllm_plugins.patches import install as patches
from vllm_ppd.vllm_plugins.patches import start

register()
OURS = {"method": "early", "exit_layer": 3}


def test_the_entry_point_registers_once() -> None:
    points = entry_points(group="vllm.general_plugins", name="vllm_ppd")
    (load,) = (point.load() for point in points)
    before = EngineArgs.create_speculative_config
    load()
    assert EngineArgs.create_speculative_config is before


def test_unsupported_vllm(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside the range: one line, nothing patched but refusals, and the range in each."""
    wrapped: list[str] = []
    monkeypatch.setattr(patches, "vllm_version", lambda: "0.99.0")
    monkeypatch.setattr(patches, "wrap", lambda _, name, __: wrapped.append(name))
    with our_log() as messages:
        patches.install()
    assert wrapped == ["excepthook", "create_speculative_config", "add_cli_args"]
    assert len(messages) == 1 and "0.99.0" in messages[0]

    def started(**asked: Any) -> Any:
        args = EngineArgs(model=str(tiny_model()), **asked)
        return patches.refuse_methods(lambda self: "stock", args)

    assert started(speculative_config={"method": "ngram"}) == started() == "stock"
    refusal = r"supports vLLM .*<0.34.* found 0\.99\.0"
    for asked in ({"speculative_config": OURS}, {"spec_model": "paradecode"}):
        with pytest.raises(OptionError, match=refusal):
            started(**asked)
    parser = patches.add_refused_flags(lambda parser: None, ArgumentParser())
    for words in ("--speculative-model ./heads", "--no-ppd-adaptive"):
        flag, *_ = words.split()
        with pytest.raises(OptionError, match=f"^{flag}: .*{refusal}"):
            parser.parse_args(words.split())


def test_only_our_methods_take_min_p_and_logit_bias(tiny_model: Factory) -> None:
    """Other methods verify drafts by vLLM's rejection sampler."""
    lookups = {"method": "ngram", "num_speculative_tokens": 2}
    for given in ({"min_p": 0.1}, {"logit_bias": {3: 1.0}}):
        params = SamplingParams(**given)
        ours = from_dict(tiny_model(), OURS).speculative_config
        params._validate_spec_decode(ours)
        others = from_dict(tiny_model(), lookups).speculative_config
        with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
            params._validate_spec_decode(others)


def test_runner_v2_and_asynchronous_scheduling_are_open_to_us(
    tiny_model: Factory,
) -> None:
    """vLLM 0.32 starts no proposer class on V2, and grants asynchronous scheduling a
    closed list of methods. On a CPU it is off unless a user asks for it, as in vLLM.
    """
    unasked = from_dict(tiny_model(), OURS).scheduler_config
    assert unasked.async_scheduling is not current_platform.is_cpu()
    vllm_config = from_dict(tiny_model(), OURS, async_scheduling=True)
    assert vllm_config.use_v2_model_runner
    assert vllm_config.scheduler_config.async_scheduling
    assert not vllm_config._get_v2_model_runner_unsupported_features()
    seen: list[str] = []
    start.complete_config(
        lambda self: seen.extend(get_args(vllm_module.NgramGPUTypes)), vllm_config
    )
    assert "custom_class" in seen
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    assert scheduler.__name__ == "AsyncDraftingScheduler"
    assert "custom_class" not in get_args(vllm_module.NgramGPUTypes)
    vllm_config.additional_config = {}
    unsupported = vllm_config._get_v2_model_runner_unsupported_features()
    assert any("custom_class" in feature for feature in unsupported)


def test_data_parallel_ranks_choose_their_drafts(tiny_model: Factory) -> None:
    """vLLM takes the choice from every model, though ranks of a dense one are independent."""
    schedule = [(1, 1, 3), (2, 8, 0)]
    stock = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
    }
    for asked, kept in ((stock, None), (OURS, schedule)):
        vllm_config = from_dict(tiny_model(), asked)
        vllm_config.parallel_config.data_parallel_size = 2
        config = vllm_config.speculative_config
        config.num_speculative_tokens_per_batch_size = schedule
        vllm_config._maybe_disable_dynamic_sd_for_data_parallel()
        assert config.num_speculative_tokens_per_batch_size == kept


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.31.2", False),
        ("0.32.0", True),
        ("0.33.0+cpu", True),
        ("0.34.0rc1", False),
        ("unknown", False),
    ],
)
def test_version_range(version: str, supported: bool) -> None:
    assert patches.is_supported(version) == supported


def test_compilation_cache_key_is_stable(tiny_model: Factory) -> None:
    """The same server started twice finds what it compiled; another exit layer does not."""
    keys = [
        from_dict(tiny_model(), OURS | {"exit_layer": layer}).compute_hash()
        for layer in (3, 3, 2)
    ]
    assert keys[0] == keys[1] != keys[2]


# ---- a vLLM started without our flag


SCRIPT = """
import sys
import conftest, cases, json
if __name__ == "__main__":
    print(json.dumps(cases.batch_16(conftest.start_engine(sys.argv[1], None))))
"""


@pytest.mark.full
@pytest.mark.engine
def test_output_is_that_of_a_vllm_without_us(
    engine: Factory, tiny_model: Factory
) -> None:
    """The same requests in a process where VLLM_PLUGINS switches us off."""
    run = run_script(SCRIPT, tiny_model(), VLLM_PLUGINS="")
    assert "vllm-ppd" not in run.stdout + run.stderr
    expected = generate(engine(), prompts(16), greedy())
    assert json.loads(run.stdout.splitlines()[-1]) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="not a CPU build")
def test_vllms_own_methods_on_a_cpu_are_mended() -> None:
    """Its backend drops sampling parameters of drafts, which measurements of these
    methods must not have.
    """
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    mend_workers_to_come()
    # As every worker does when it starts, here once (conftest.py)
    current_platform.register_triton_kernel_overrides.__wrapped__()
    values = torch.tensor([0.5, 0.0, 0.7])
    ends = torch.tensor([2, 2, 3], dtype=torch.int32)
    spread = expand_batch_to_tokens(
        values,
        ends,
        3,
        0,
        1,
    )
    assert torch.equal(spread, values[[0, 0, 2]])
