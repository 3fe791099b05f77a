# SPDX-License-Identifier: Apache-2.0
"""Published speculators in engines: what they draft is the formulas', and what vLLM's
own module reads is read.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import generate, greedy, prompts
from conftest import Factory, drafter_of
from published import LAYOUTS, drafts, publish, states, weights_of
from refusals import edited
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("size", [None, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_the_formula(
    engine: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    size: int | None,
) -> None:
    """Of the whole vocabulary, and of the tokens that a text has most often; the output
    is vLLM's.
    """
    folder = publish(tmp_path / "heads", layout, "speculator.", 2)
    config = LAYOUTS[layout]
    tensors = weights_of(config)
    options: dict[str, Any] = {"model": str(folder), "draft_vocab_size": size}
    if size is not None:
        counts = torch.zeros(320, dtype=torch.int64)
        counts[7 : 7 + 2 * size : 2] = 5
        save_file({"token_counts": counts}, folder / "token_counts.safetensors")
        edited("token_counts", value=True)(folder)
        for name in tensors:
            if name.startswith("head"):
                tensors[name][counts == 0] = -1e3
    llm = engine(options)
    drafter = drafter_of(llm).drafter
    seen = []
    propose = drafter.propose

    def spied(step: Any) -> Any:
        made = propose(step)
        drafted = made.token_ids.tolist()
        seen.extend(zip(step.hidden.clone(), step.newest_ids.tolist(), drafted))  # noqa: B905
        return made

    monkeypatch.setattr(drafter, "propose", spied)
    expected = generate(engine(), prompts(3), greedy(12))
    assert generate(llm, prompts(3), greedy(12)) == expected
    assert len(seen) >= 30
    for hidden, newest, drafted in seen:
        assert drafted == drafts(config, tensors, hidden, newest, config["n_predict"])


@pytest.mark.parametrize("layout", ["ibm", "ibm-5"])
def test_vllms_own_module_reads_the_same(
    engine: Factory, tmp_path: Path, layout: str
) -> None:
    """vLLM 0.32 has the module without the loop that ran it: its parts, in that loop,
    give the formulas' logits.
    """
    models = "vllm.model_executor.models.mlp_speculator"
    speculator = pytest.importorskip(models, reason="vLLM 0.33 has no MLP speculators")
    from vllm.transformers_utils.configs import MLPSpeculatorConfig

    engine()  # vLLM's parallel groups
    config = LAYOUTS[layout]
    hidden = torch.randn(64)
    tokens = [3, 50, 7]
    settings = {"vocab_size": 320, "top_k_tokens_per_head": [1] * config["n_predict"]}
    hf_config = MLPSpeculatorConfig(**config | settings)
    model_config = SimpleNamespace(hf_config=hf_config)
    with set_current_vllm_config(VllmConfig()):
        module = speculator.MLPSpeculator(
            vllm_config=SimpleNamespace(model_config=model_config)
        )
    stored = load_file(publish(tmp_path, layout, "speculator.") / "model.safetensors")
    assert module.load_weights(stored.items()) == dict(module.named_parameters()).keys()
    state = module.ln0(hidden) / 2**0.5 if config["scale_input"] else hidden
    scale = module.emb_weight / module.state_weight
    for i, (logits, _) in enumerate(states(config, weights_of(config), hidden, tokens)):
        embedded = module.emb[i](torch.tensor(tokens[i]))
        state = module.ln[i](module.proj[i](state) + scale * embedded)
        state = module.activation(state)
        read = module.head[i].weight[:320] @ state
        torch.testing.assert_close(read, logits, rtol=1e-4, atol=1e-4)
