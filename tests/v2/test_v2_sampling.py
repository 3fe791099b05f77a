# SPDX-License-Identifier: Apache-2.0
"""On runner V2, sampled output has the target's distribution: chi-square against exact probabilities of a vocabulary
so small that they can be written down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overfitted
import pytest
import tiny
import torch
from conftest import Factory, counting, start_engine
from scipy.stats import binom, chisquare
from transformers import AutoModelForCausalLM

from vllm_ppd.kernels.dispatch import SWITCH
from vllm_ppd.kernels.sampling import Sampling, distribution

pytestmark = pytest.mark.engine
VOCAB, PROMPT, TOKENS = 16, [7, 3, 9, 12, 5], 3
LEVEL = 4e-4  # five tests a comparison: a correct sampler fails one comparison in 500


@pytest.fixture(scope="module")
def model(made_once: Factory) -> Path:
    return made_once("sixteen", lambda folder: tiny.make_model(folder, vocab_size=VOCAB, initializer_range=0.1))


@pytest.fixture(scope="module")
def logits(model: Path) -> list[torch.Tensor]:
    """Of token i + 1 after every i tokens, [TOKENS][16, ...]: the target's own, by transformers."""
    target, prefixes, logits = AutoModelForCausalLM.from_pretrained(model), torch.tensor([PROMPT]), []
    for _ in range(TOKENS):
        with torch.no_grad():
            logits.append(target(prefixes).logits[:, -1])
        tokens = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, dim=0), tokens], dim=1)
    return logits


def probabilities(logits: Any, temperature: float, top_k: int | None) -> torch.Tensor:
    """Of every output: [16, 16, 16]."""
    joint = torch.ones(1)
    for at in logits:
        limit = None if top_k is None else torch.full((len(at),), top_k)
        rows = distribution(at, Sampling(torch.full((len(at),), temperature), limit))
        joint = (joint[:, None] * rows).flatten()
    return joint.view(*[VOCAB] * TOKENS)


def p_value(outcomes: list[Any], expected: dict[Any, float]) -> float:
    """Goodness of fit; outcomes too rare for the test are pooled."""
    counts, total = Counter(outcomes), len(outcomes)
    common = [outcome for outcome, p in expected.items() if p * total >= 5]
    seen, wanted = [float(counts[o]) for o in common], [expected[o] * total for o in common]
    rest, others = max(0.0, total - sum(wanted)), int(total - sum(seen))
    assert rest > 5 or binom.sf(others - 1, total, rest / total) > LEVEL, "outcomes that must not be"
    if rest > 5:
        seen, wanted = [*seen, total - sum(seen)], [*wanted, rest]
    return float(chisquare(seen, [w * sum(seen) / sum(wanted) for w in wanted]).pvalue)


def worst(outputs: list[tuple[int, ...]], joint: torch.Tensor) -> float:
    """The least p-value over tokens and pairs of neighbours."""
    p_values = []
    for places in ((0,), (1,), (2,), (0, 1), (1, 2)):
        marginal = joint.sum(dim=[d for d in range(TOKENS) if d not in places])
        expected = {tuple(index): float(marginal[tuple(index)]) for index in torch.cartesian_prod(
            *[torch.arange(VOCAB)] * len(places)).view(-1, len(places)).tolist()}  # fmt: skip
        p_values.append(p_value([tuple(out[p] for p in places) for out in outputs], expected))
    return min(p_values)


@pytest.fixture(scope="module")
def sampling_engine(model: Path, logits: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Engines that schedule asynchronously, with heads fitted to what the target says."""
    import interpreted

    started: dict[str, Any] = {}

    def get(method: str) -> Any:
        if method not in started:
            options: dict[str, Any] = {"method": method, "runner": "v2", "num_speculative_tokens": 2}
            if method in ("cp", "dynamo"):
                joint = probabilities(logits, 1.0, None).flatten()
                said = torch.multinomial(joint, 400, replacement=True, generator=torch.Generator().manual_seed(0))
                outputs = torch.stack([said // VOCAB**2, said // VOCAB % VOCAB, said % VOCAB], dim=1)
                sequences = [PROMPT + tokens for tokens in outputs.tolist()]
                folder = tmp_path_factory.mktemp(method) / "heads"
                if method == "dynamo":
                    options["eps_b"] = 0.0  # drafts that the joint backs off from count as drafted, and rejected
                options["model"] = str(overfitted.fit(model, method, sequences, folder, steps=40))
            else:
                options["exit_layer"] = 5
            interpreted.asynchronous = True
            started[method] = start_engine(
                model, options, max_num_seqs=32, max_num_batched_tokens=256, skip_tokenizer_init=True
            )
        return started[method]

    return get


@pytest.mark.parametrize(
    ("samples", "top_k"),
    [(240, None), pytest.param(1200, None, marks=pytest.mark.full), pytest.param(1200, 4, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("method", ["cp", "ppd", pytest.param("dynamo", marks=pytest.mark.full)])
def test_distribution(
    sampling_engine: Factory, logits: Any, monkeypatch: pytest.MonkeyPatch, method: str, samples: int, top_k: int | None
) -> None:
    """Few samples are drawn by the kernels, as on a GPU, many by their references."""
    from vllm import SamplingParams

    monkeypatch.setenv(SWITCH, "always" if samples < 1000 else "0")
    llm = sampling_engine(method)
    params = SamplingParams(
        temperature=0.8, max_tokens=TOKENS, top_k=top_k or 0, ignore_eos=True, detokenize=False, seed=None
    )
    with counting(llm) as seen:
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * samples, params, use_tqdm=False)
        said = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert worst(said, probabilities(logits, 0.8, top_k)) > LEVEL
    # Both outcomes of the rejection sampler must have been seen.
    assert 0.05 < seen["accepted"] / seen["drafted"] < 0.95
