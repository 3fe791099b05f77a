# SPDX-License-Identifier: Apache-2.0
"""An engine whose target and heads are names on a Hub of the loopback interface."""

import json
import shutil
from pathlib import Path

import pytest
from cases import CASES, PLAIN
from conftest import Factory, accepting, drafter_of, start_engine
from hub import running_hub

pytestmark = pytest.mark.engine


def test_heads_and_target_by_name(
    tiny_model: Factory,
    fitted_heads: Factory,
    engine: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`vllm serve acme/heads@v1`: the revision of the heads, the target that they name,
    drafts, and vLLM's output.
    """
    expected = CASES["batch_16"](engine())
    heads = shutil.copytree(fitted_heads("cp", **PLAIN[1]), tmp_path / "heads")
    config = json.loads((heads / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "acme/target"
    (heads / "config.json").write_text(json.dumps(config))
    with running_hub(tmp_path, monkeypatch) as hub:
        hub.add("acme/target", tiny_model())
        hub.add("acme/heads", heads, "v1")
        llm = start_engine("acme/heads@v1", None)  # type: ignore[arg-type]
        commit = hub.commit("acme/heads", "v1")
        assert drafter_of(llm).config.model == f"acme/heads@{commit}"
        assert llm.llm_engine.vllm_config.model_config.model == "acme/target"
        with accepting(llm):
            assert CASES["batch_16"](llm) == expected
