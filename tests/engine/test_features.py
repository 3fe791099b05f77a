# SPDX-License-Identifier: Apache-2.0
"""vLLM's own features with drafting: greedy output is vLLM's with the feature, and
drafts are accepted.
"""

from pathlib import Path
from typing import Any

import adapters
import pytest
from cases import CASES, RECURRENT, generate, greedy, prompts, tokens_of
from conftest import (
    Factory,
    accepting,
    counting,
    full_but,
    runner_of,
    scheduler_of,
    start_engine,
)
from methods import METHODS, imitate_sleep
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.lora.request import LoRARequest

from vllm_ppd.vllm_plugins.config.options import OptionError

pytestmark = pytest.mark.engine

# Reads input embeddings and the LM head
HEADS = [
    RECURRENT,
    ("recurrent", {}),
    ("cp", RECURRENT[1] | {"layers": (1, 3)}),
]


@pytest.mark.parametrize(
    ("kind", "how"),
    full_but(HEADS[:1], HEADS),
    ids=["cp", "recurrent", "layers"],
)
def test_lora(
    engine: Factory,
    fitted_heads: Factory,
    tiny_model: Factory,
    tmp_path: Path,
    kind: str,
    how: dict[str, Any],
) -> None:
    """Requests with an adapter beside others without; drafts are those of an engine
    without adapters.
    """
    settings = adapters.SETTINGS
    folder = adapters.make_adapter(tmp_path, tiny_model())
    adapter = LoRARequest("random", 1, str(folder))
    options = {"method": kind, "model": fitted_heads(kind, **how)}
    requests = [adapter if i % 2 else None for i in range(16)]

    def said(llm: Any, draft: bool) -> tuple[list[list[int]], float]:
        """Output, and accepted drafts; without draft, adapted requests do not."""
        params = [
            greedy(extra_args={"ppd_draft": draft or request is None})
            for request in requests
        ]
        with counting(llm) as seen:
            outputs = llm.generate(
                prompts(16),
                params,
                use_tqdm=False,
                lora_request=requests,
            )
        return tokens_of(outputs), seen["accepted"]

    expected, _ = said(engine(**settings), True)
    plain = CASES["batch_16"](engine())
    changed = [tokens != expected[i] for i, tokens in enumerate(plain)]
    assert changed == [request is not None for request in requests]
    llm = engine(options, **settings)
    tokens, accepted = said(llm, True)
    assert tokens == expected and accepted > 0
    tokens, accepted = said(llm, False)
    assert tokens == expected
    base = engine(options)
    with counting(base) as seen:
        generate(base, prompts(16)[::2], greedy())
    assert accepted == seen["accepted"] > 0


@pytest.mark.parametrize("name", full_but({"cp", "early"}, METHODS))
def test_kv_connector(
    engine: Factory,
    with_heads: Factory,
    tiny_model: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """KV of prompts is stored and loaded, that of draft layers included; drafts are
    never stored.
    """
    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    requests = prompts(4, 100)
    options = with_heads(
        {
            **METHODS[name],
            "adaptive": True,
            "step_costs": "measure",
        }
    )
    expected = generate(engine(), requests, greedy())
    # One a process, and its end is the test's
    monkeypatch.setattr(
        kv_transfer_state,
        "_KV_CONNECTOR_AGENT",
        None,
    )
    # The connector stores prompts that are taken in at once.
    llm = start_engine(
        tiny_model(),
        options,
        kv_transfer_config=connector,
        max_num_batched_tokens=512,
    )
    scheduler = scheduler_of(llm)
    assert len(scheduler.draft_policy.seconds.table.sizes) > 1, (
        "step costs were not measured beside a connector"
    )
    scheduler.draft_policy = None  # every step drafts
    layers = len(runner_of(llm).compilation_config.static_forward_context)
    assert layers == 6 + 2 * (name == "dynamo")
    for hit in (False, True):
        with accepting(llm):
            outputs = llm.generate(requests, greedy(), use_tqdm=False)
        assert tokens_of(outputs) == expected
        for output in outputs:
            blocks = (len(output.prompt_token_ids) - 1) // 32
            assert output.num_cached_tokens == (32 * blocks if hit else 0)
        stored = {path.name for path in tmp_path.rglob("*.safetensors")}
        assert len(stored) == layers


@pytest.mark.parametrize("name", METHODS)
def test_sleep_level_1(
    drafting: Factory,
    engine: Factory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The KV cache does not come back, and nothing of ours depends on it."""
    imitate_sleep(monkeypatch)
    llm = drafting(
        METHODS[name], enable_sleep_mode=True, enable_prefix_caching=True
    )
    expected = CASES["batch_16"](engine())
    assert CASES["batch_16"](llm) == expected
    with pytest.raises(OptionError, match="sleep level 2 is not supported"):
        llm.sleep(level=2)
    llm.sleep(level=1)
    llm.wake_up()
    with counting(llm) as seen:
        assert CASES["batch_16"](llm) == expected
    assert seen["accepted"] > 0.02 * seen["drafted"] > 0
