# SPDX-License-Identifier: Apache-2.0
"""The demo model's heads are accepted by vLLM exactly as often as `ppd calibrate` says."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import overfitted
import pytest
import torch
from cases import greedy
from conftest import DEMO, ROOT, Factory, full_but, start_engine, write_texts

from vllm_ppd.heads.calibration.acceptance import Texts
from vllm_ppd.heads.calibration.run import Calibration, open_calibration
from vllm_ppd.heads.cp import calibration as cp
from vllm_ppd.heads.cp.module import CPHead
from vllm_ppd.heads.dynamo import calibration as dynamo
from vllm_ppd.heads.early import calibration as early
from vllm_ppd.heads.module import most_frequent
from vllm_ppd.heads.options import CalibrationOptions
from vllm_ppd.heads.planning import Counts

PROMPT = 48
TOKENS = 64
EXIT = 9


@pytest.fixture(scope="module")
def calibration(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Calibration]]:
    """calibration(variant) on held-out files, the target found from the repository's root."""
    from vllm_ppd.benchmarks.models.texts import split

    data = write_texts(
        tmp_path_factory.mktemp("data") / "validation.jsonl", split()[1]
    )

    def opened(heads: str) -> Calibration:
        return open_calibration(
            CalibrationOptions(
                heads=heads,
                data=(str(data),),
                num_prompts=24,
                eps_b=(0.0,),
                prompt_tokens=PROMPT,
            )
        )

    def get(variant: str) -> Calibration:
        shipped = opened(f"benchmarks/demo/heads/{variant.split(',')[0]}")
        if variant not in FITTED:
            return shipped
        folder = tmp_path_factory.mktemp("fitted") / "heads"
        texts = shipped.greedy.ids[:8, :128].tolist()
        kind = shipped.config.kind
        overfitted.fit(DEMO, kind, texts, folder, 8, **FITTED[variant])
        return opened(str(folder))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield get


WHOLE = 4096  # tokens of the demo model
# Heads that are fitted here
FITTED: dict[str, dict[str, Any]] = {
    "cp, recurrent": {"rank": 2, "condition": "recurrent"},
    "early, 1024 tokens": {"exit_layers": (EXIT,)},
    "dynamo, learned mask": {"mask_rank": 8},
}
EARLY = {
    "method": "early",
    "exit_layer": EXIT,
    "num_speculative_tokens": 3,
}
CP = {"method": "cp", "num_speculative_tokens": 3}
DYNAMO = {
    "method": "dynamo",
    "num_speculative_tokens": 2,
    "eps_b": 0.0,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "early": EARLY,
    "early, 1024 tokens": EARLY | {"draft_vocab_size": 1024},
    "cp, 1024 tokens": CP | {"draft_vocab_size": 1024},
    "cp, recurrent": CP | {"draft_vocab_size": 1024},
    "dynamo, 1024 tokens": DYNAMO | {"draft_vocab_size": 1024},
    "dynamo, learned mask": DYNAMO | {"draft_vocab_size": 1024},
}


def predicted(variant: str, calibration: Calibration, texts: Texts) -> Counts:
    """What calibration expects an engine to count that emits exactly these texts."""
    config = calibration.config
    size = OPTIONS[variant].get("draft_vocab_size", WHOLE)
    short = None
    if size < WHOLE:
        short = most_frequent(calibration.tensors[config.counts_tensor], size)
    if config.kind == "early":
        return early.read_exits(calibration, texts, short).drafted(3)[EXIT][2]
    if config.kind == "cp":
        return cp.by_drafts(calibration, texts, short, CPHead).by_drafts[2]
    return dynamo.drafted(calibration, texts, short).rows[1]


@pytest.mark.engine
@pytest.mark.parametrize(
    "variant",
    full_but(
        {"cp, 1024 tokens", "early, 1024 tokens"},
        OPTIONS,
    ),
)
def test_engine_counts_what_calibration_expects(
    calibration: Factory, variant: str
) -> None:
    """A head wired one position off would show here. Greedy to the last draft; sampled
    within sampling error.
    """
    made = calibration(variant)
    requests = [{"prompt_token_ids": ids} for ids in made.prompts]
    llm = start_engine(
        DEMO,
        {**OPTIONS[variant], "model": made.options.heads},
        max_num_batched_tokens=512,
        max_num_seqs=32,
        kv_cache_memory_bytes=1 << 28,
        per_request_spec_decode_metrics="detailed",
    )
    for temperature in (0.0, 0.8):
        outputs = llm.generate(
            requests,
            greedy(TOKENS, temperature=temperature),
            use_tqdm=False,
        )
        seen = counted(outputs, OPTIONS[variant]["num_speculative_tokens"])
        ids = torch.tensor(
            [o.prompt_token_ids + list(o.outputs[0].token_ids) for o in outputs]
        )
        lengths = torch.full((len(ids),), TOKENS)
        texts = Texts(
            ids, PROMPT, lengths, temperature, torch.zeros_like(lengths)
        )
        expected = predicted(variant, made, texts)
        if temperature:
            # DynaMo's drafts are expected to be accepted as by rejection sampling,
            # which accepts a little more.
            assert seen["accepted"] == pytest.approx(
                expected.accepted, rel=0.08 if "dynamo" in variant else 0.05
            )
        elif (
            "dynamo" in variant
        ):  # what calibration backs off from is verified as well
            assert seen["accepted"] == expected.accepted
        else:
            for name in ("drafts", "drafted", "accepted"):
                assert seen[name] == round(getattr(expected, name))
        assert seen["accepted"] > 100


def counted(
    outputs: list[Any], drafts: int, tokens: int = TOKENS
) -> Counter[str]:
    """What engines count, without drafts beyond the end of a request, which calibration
    does not have.
    """
    seen = Counter[str]()
    for output in outputs:
        left = tokens - 1  # the prompt's step emits one
        metrics = output.outputs[0].spec_decode_metrics.to_dict()
        for accepted in metrics["per_step_accepted"]:
            made = min(drafts, left - 1)
            if made > 0:
                kept = min(accepted, made)
                seen.update(drafts=1, drafted=made, accepted=kept)
            left -= 1 + min(accepted, made)
    return seen
