# SPDX-License-Identifier: Apache-2.0
"""What is measured of each kind of heads."""

from __future__ import annotations

from typing import Any

import torch

from vllm_ppd.heads.calibration.run import Calibration, Part
from vllm_ppd.heads.calibration.text import Texts
from vllm_ppd.heads.calibration.walk import Drafted
from vllm_ppd.heads.config import DynaMoConfig, EarlyConfig
from vllm_ppd.heads.cp import measures as cp_measures
from vllm_ppd.heads.cp.module import CPHead
from vllm_ppd.heads.draft_vocabulary import candidate_sizes, covered, most_frequent
from vllm_ppd.heads.dynamo.cooccurrence import CoOccurrence
from vllm_ppd.heads.dynamo.joint_settings import JointSettings
from vllm_ppd.heads.dynamo.measures import DynaMoMeasures
from vllm_ppd.heads.dynamo.module import DynaMoHeads
from vllm_ppd.heads.dynamo.recipe import new_layers
from vllm_ppd.heads.early.measures import FORMS, ExitMatches, match_exits, position_buckets
from vllm_ppd.heads.early.module import EarlyHeads
from vllm_ppd.heads.training.tokens import Batch

TOP_K, TOP_P = 3, 0.95  # PPD, appendix B
DYNAMIC_TOKENS = 1024  # a joint of three heads has 125,000 entries a token


def timing(calibration: Calibration) -> dict[str, Any]:
    """Seconds of a layer and an LM head by batch size; h, the LM head's share of a pass; a d x d matrix in layers.

    What a transform costs is told by its weights: timed by itself it would be read from the processor's cache.
    """
    target = calibration.target
    weights = sum(parameter.numel() for parameter in target.layers[-1].parameters())
    return {
        "seconds": calibration.times,
        "lm_head_share": round(calibration.head_share, 4),
        "transform_in_layers": round(target.hidden_size**2 / weights, 4),
    }


def early_matches(calibration: Calibration) -> dict[str, Any]:
    """p(layer, k), by position too, on greedy texts; expected acceptance on greedy and sampled texts."""
    heads, options = _early_heads(calibration), calibration.options
    found: dict[str, Any] = {"layers": list(heads.exit_layers), "ks": list(options.ks), "acceptance": {}}
    for name, texts in (("greedy", calibration.greedy), (f"T {options.temperature:g}", calibration.sampled)):
        matches = _matches(calibration, heads, texts)
        if name == "greedy":
            found["match"] = _rates(matches)
            found["match_by_position"] = {
                label: _rates(matches, bucket) for label, bucket in position_buckets(options.new_tokens)
            }
        found["acceptance"][name] = {
            form: {
                str(layer): [_counts(matches.drafted(f, layer, n)) for n in range(1, options.drafts + 1)]
                for layer in heads.exit_layers
            }
            for f, form in enumerate(FORMS)
        }
        found.setdefault("repeated_4_grams", {})[name] = round(texts.repeated_4_grams(), 4)
    return found


def early_sampling(calibration: Calibration) -> dict[str, Any]:
    """PPD, Table 5: p_correct at k = 3 when the target decodes greedily, by top-k (3) and by top-p (0.95)."""
    heads = _early_heads(calibration)
    ways = {
        "greedy": calibration.greedy,
        f"top-k ({TOP_K})": calibration.write(1.0, top_k=TOP_K),
        f"top-p ({TOP_P})": calibration.write(1.0, top_p=TOP_P),
    }
    return {name: _rates(_matches(calibration, heads, texts, (3,))) for name, texts in ways.items()}


def _early_heads(calibration: Calibration) -> EarlyHeads:
    config, target = calibration.config, calibration.target
    assert isinstance(config, EarlyConfig)
    heads = EarlyHeads.from_tensors(calibration.tensors, config.exit_layers, config.head)
    return heads.to(target.device, target.dtype)


def _matches(
    calibration: Calibration, heads: EarlyHeads, texts: Texts, ks: tuple[int, ...] | None = None
) -> ExitMatches:
    options = calibration.options
    return match_exits(calibration.target, heads, texts, ks or options.ks, options.batch, calibration.autocast)


def _rates(matches: ExitMatches, positions: slice | None = None) -> dict[str, dict[str, list[float]]]:
    """{k: {N or Y: [rate of each layer]}}"""
    return {
        str(k): {
            form: [round(matches.rate(f, layer, k, positions), 4) for layer in matches.layers]
            for f, form in enumerate(FORMS)
        }
        for k in matches.ks
    }


def cp_likelihood(calibration: Calibration) -> dict[str, Any]:
    """Joint NLL, PPL_n and PPL_1:n on the data itself."""
    head = _cp_head(calibration)
    return cp_measures.perplexities(calibration.target, head, calibration.windows, calibration.autocast)


def cp_acceptance(calibration: Calibration) -> dict[str, Any]:
    """Expected acceptance on greedy and sampled texts."""
    options, head = calibration.options, _cp_head(calibration)
    found = {}
    for name, texts in (("greedy", calibration.greedy), (f"T {options.temperature:g}", calibration.sampled)):
        counts = cp_measures.drafted(calibration.target, head, texts, options.batch, calibration.autocast)
        found[name] = {
            "by_drafts": [_counts(c) for c in counts], "repeated_4_grams": round(texts.repeated_4_grams(), 4)
        }  # fmt: skip
    return found


def cp_vocabulary(calibration: Calibration) -> dict[str, Any]:
    """Expected acceptance on sampled texts with shorter draft vocabularies."""
    options, head, target = calibration.options, _cp_head(calibration), calibration.target
    return {
        str(len(ids)): {
            "covers": share,
            "by_drafts": [
                _counts(c)
                for c in cp_measures.drafted(
                    target, head, calibration.sampled, options.batch, calibration.autocast, ids
                )
            ],
        }
        for ids, share in _vocabularies(calibration)
    }


def _vocabularies(calibration: Calibration) -> list[tuple[torch.Tensor, float]]:
    """Draft vocabularies shorter than the whole, each with the share of the training text that it covers."""
    if calibration.config.counts_tensor is None:
        return []
    counts = calibration.tensors[calibration.config.counts_tensor]
    share, device = covered(counts), calibration.target.device
    return [
        (most_frequent(counts, size).to(device), round(float(share[size - 1]), 4))
        for size in candidate_sizes(len(counts))
    ]


def _cp_head(calibration: Calibration) -> CPHead:
    return CPHead.from_tensors(calibration.tensors).to(calibration.target.device, calibration.target.dtype)


def dynamo_likelihood(calibration: Calibration) -> dict[str, Any]:
    """PPL_n and PPL_1:n on the data itself (DynaMo, Table 2)."""
    return dynamo_measures(calibration).perplexities(calibration.windows)


def dynamo_dynamic(calibration: Calibration) -> dict[str, Any]:
    """PPL_d and the share of n-grams against eps_b (DynaMo, Figs. 5 and 15), on at most DYNAMIC_TOKENS of the data."""
    measures, settings = dynamo_measures(calibration), _joint_settings(calibration)
    windows = calibration.windows[0]
    few = max(1, DYNAMIC_TOKENS // windows.input_ids.shape[1])
    batch = Batch(windows.input_ids[:few], windows.position_ids[:few])
    return {"by_eps_b": measures.dynamic_perplexity([batch], settings, calibration.options.eps)}


def dynamo_acceptance(calibration: Calibration) -> dict[str, Any]:
    """Expected acceptance in verified mode, by back-off threshold and drafts."""
    options, measures, settings = calibration.options, dynamo_measures(calibration), _joint_settings(calibration)
    found: dict[str, Any] = {}
    for name, texts in (("greedy", calibration.greedy), (f"T {options.temperature:g}", calibration.sampled)):
        rows = _rows(measures.drafted(texts, settings, options.batch, options.eps))
        found[name] = {"rows": rows, "repeated_4_grams": round(texts.repeated_4_grams(), 4)}
    return found


def dynamo_vocabulary(calibration: Calibration) -> dict[str, Any]:
    """Expected acceptance in verified mode on sampled texts with shorter draft vocabularies."""
    options, measures, settings = calibration.options, dynamo_measures(calibration), _joint_settings(calibration)
    return {
        str(len(ids)): {
            "covers": share,
            "rows": _rows(measures.drafted(calibration.sampled, settings, options.batch, options.eps, ids)),
        }
        for ids, share in _vocabularies(calibration)
    }


def _rows(counts: dict[tuple[float, int], Drafted]) -> list[dict[str, Any]]:
    return [{"eps_b": eps, "drafts_allowed": drafts, **_counts(c)} for (eps, drafts), c in counts.items()]


def dynamo_measures(calibration: Calibration) -> DynaMoMeasures:
    config, target = calibration.config, calibration.target
    assert isinstance(config, DynaMoConfig)
    heads = DynaMoHeads(new_layers(target, config.tokens))
    heads.load(calibration.tensors)
    heads.to(target.device, target.dtype).eval()
    counts = CoOccurrence.from_tensors(calibration.tensors)
    return DynaMoMeasures(target, heads, counts and counts.to(target.device), calibration.autocast)


def _joint_settings(calibration: Calibration) -> JointSettings:
    config = calibration.config
    assert isinstance(config, DynaMoConfig)
    return config.sampling


def _counts(drafted: Drafted) -> dict[str, float]:
    raw = {name: round(value, 2) for name, value in drafted._asdict().items()}
    return raw | {"rate": round(drafted.rate, 4), "length": round(drafted.length, 4)}


PARTS: dict[str, dict[str, Part]] = {
    "early": {"timing": timing, "matches": early_matches, "sampling": early_sampling},
    "cp": {"timing": timing, "likelihood": cp_likelihood, "acceptance": cp_acceptance, "vocabulary": cp_vocabulary},
    "dynamo": {
        "timing": timing,
        "likelihood": dynamo_likelihood,
        "dynamic": dynamo_dynamic,
        "acceptance": dynamo_acceptance,
        "vocabulary": dynamo_vocabulary,
    },
}
