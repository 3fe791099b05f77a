# SPDX-License-Identifier: Apache-2.0
"""`--speculative-model ppd` alone drafts with the heads in the model's folder."""

import shutil
from pathlib import Path

import pytest
from cases import CASES
from conftest import DEMO, Factory, drafter_of, start_engine
from vllm import SamplingParams

pytestmark = pytest.mark.engine


def test_heads_in_the_model_s_folder(
    tiny_model: Factory, fitted_heads: Factory, engine: Factory, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    heads = shutil.copytree(fitted_heads("cp"), model / "ppd")
    llm = start_engine(model, {"method": "ppd", "adaptive": False})
    assert drafter_of(llm).config.model == str(heads)
    assert CASES["batch_16"](llm) == CASES["batch_16"](engine())
    assert llm.counts["accepted"] > 0


def test_the_demo_model_has_early_heads() -> None:
    texts = []
    params = SamplingParams(temperature=0, max_tokens=64)
    for options in (None, {"method": "ppd"}):
        llm = start_engine(DEMO, options)
        (output,) = llm.generate(["def __init__(self, "], params, use_tqdm=False)
        texts.append(list(output.outputs[0].token_ids))
    assert texts[0] == texts[1]
    assert drafter_of(llm).config.model == str(DEMO / "ppd")
    assert llm.counts["accepted"] > 0
