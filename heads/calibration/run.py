# SPDX-License-Identifier: Apache-2.0
"""The calibration of a heads folder: parts that are kept as they finish, tables, and a recommendation."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.calibration.options import CalibrationOptions
from vllm_ppd.heads.calibration.own_folder import check_own_folder, own_folder
from vllm_ppd.heads.calibration.recommend import recommend
from vllm_ppd.heads.calibration.stored import NAME, continued, digest
from vllm_ppd.heads.calibration.text import Padded, Texts, generate, record_prompts, take_prompts
from vllm_ppd.heads.calibration.timing import head_share, time_layers
from vllm_ppd.heads.card import write_card
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.files import expand
from vllm_ppd.heads.errors import HeadsError, TrainingError
from vllm_ppd.heads.fingerprint import fingerprint
from vllm_ppd.heads.io import check_target, load_tensors, save_heads, write_text
from vllm_ppd.heads.kinds import calibration_of as kind_calibration
from vllm_ppd.heads.locking import writing_folder
from vllm_ppd.heads.planning.schedule import drafts_by_batch_size
from vllm_ppd.heads.quote import place
from vllm_ppd.heads.target_check import check_on_disk
from vllm_ppd.heads.target_path import check_found, find_target
from vllm_ppd.heads.training.parallel import device_of
from vllm_ppd.heads.training.provenance import provenance, provenance_of, trained_on
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Batch

WINDOW = 512  # tokens of the windows on which perplexities are measured, where documents have so many
SHORTEST_WINDOW = 32  # in shorter ones hardly a token has as many after it as heads predict


class Calibration:
    """What the parts share: target, heads, texts (each made once, when a part first asks).

    Args:
        options: what to measure.
        shared: a calibration of other heads with otherwise the same options, whose target and texts are taken.
    """

    def __init__(self, options: CalibrationOptions, shared: Calibration | None = None) -> None:
        self.options = options
        self.config, self.tensors, name = checked(options)
        dtype = getattr(torch, options.precision)
        self._shared = shared
        self._written: dict[Any, Texts] = {} if shared is None else shared._written
        self.target: Target = shared.target if shared is not None else Target(
            name, device_of(options.device), dtype, options.trust_remote_code
        )  # fmt: skip
        check_target(
            self.config, options.heads, hidden_size=self.target.hidden_size, vocab_size=self.target.vocab_size,
            num_hidden_layers=self.target.num_layers, fingerprint=fingerprint(self.target.folder),
        )  # fmt: skip

    def autocast(self) -> Any:
        """Heads run in the target's arithmetic."""
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.options.precision == "bfloat16")

    @cached_property
    def prompts(self) -> Padded:
        """The records' own, or stretches of their texts."""
        if self._shared is not None:
            return self._shared.prompts
        options, target = self.options, self.target
        longest = (target.max_length or 1 << 30) - options.new_tokens
        found = record_prompts(options.data, target, options.prompts, longest)
        return found or Padded(take_prompts(options.data, target, options.prompts, options.prompt_tokens), None)

    @cached_property
    def greedy(self) -> Texts:
        return self.write(0.0)

    @cached_property
    def sampled(self) -> Texts:
        return self.write(self.options.temperature)

    def write(self, temperature: float, **sampling: Any) -> Texts:
        """Texts of the target after the prompts; the same ones for the same way of decoding."""
        way = (temperature, *sorted(sampling.items()))
        if way not in self._written:
            torch.manual_seed(self.options.seed)
            size, (ids, starts) = max(32, self.options.batch), self.prompts
            self._written[way] = generate(
                self.target, ids, self.options.new_tokens, temperature, size, starts, **sampling
            )
        return self._written[way]

    @cached_property
    def windows(self) -> list[Batch]:
        """The data itself, at most as many windows as there are prompts; see data_windows."""
        if self._shared is not None:
            return self._shared.windows
        return data_windows(self.options.data, self.target, self.options.prompts, self.options.batch)

    @property
    def device_name(self) -> str:
        """As vLLM names it."""
        device = self.target.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    @cached_property
    def times(self) -> dict[str, dict[int, float]]:
        return time_layers(self.target, self.options.batch_sizes, self.autocast)

    @property
    def head_share(self) -> float:
        """h: a read of the LM head in units of a full pass, batch 1."""
        return head_share(self.times, self.target.num_layers, min(self.options.batch_sizes))


def data_windows(data: Sequence[str], target: Target, most: int, size: int) -> list[Batch]:
    """Data as unpacked windows of one length, for teacher-forced likelihoods.

    Args:
        data: files, and folders of them.
        target: the model.
        most: windows at most.
        size: windows of a batch.

    Raises:
        TrainingError: if no document has SHORTEST_WINDOW tokens.
    """
    length, count = _held(data, target, most)
    prompts = take_prompts(data, target, count, length, report=False)
    positions = torch.arange(length, device=prompts.device)
    return [Batch(part, positions.expand(len(part), -1)) for part in prompts.split(size)]


def _held(data: Sequence[str], target: Target, most: int) -> tuple[int, int]:
    """Tokens of a window, and how many the data holds.

    Where no document has WINDOW tokens, a window has as many as the longest document.
    """
    found = longest = as_long = 0
    documents = Documents(data, lambda: target.tokenizer, report=False)
    for ids in documents.token_ids():
        found += len(documents.special.pieces(ids, WINDOW))
        if found >= most:
            return WINDOW, most
        if len(ids) > longest:
            longest, as_long = len(ids), 0
        as_long += len(ids) == longest
    if found:
        return WINDOW, found
    if longest < SHORTEST_WINDOW:
        raise TrainingError(
            f"the longest document of the data has {longest} tokens, and likelihoods are measured on "
            f"{SHORTEST_WINDOW} at least: give longer documents"
        )
    return longest, min(as_long, most)


def checked(options: CalibrationOptions) -> tuple[HeadsConfig, dict[str, torch.Tensor], str]:
    """The heads of a calibration, checked before their target loads, and the target's name.

    Raises:
        HeadsError: if they are damaged, if their target is nowhere, or if it is another.
    """
    config, tensors = load_tensors(options.heads)
    name = options.model or find_target(config.verifier, options.heads)
    if options.model is None:
        check_found(name, options.heads, "give its folder with --target")
    check_on_disk(config, options.heads, name, options.trust_remote_code)
    return config, tensors, name


Part = Callable[[Calibration], dict[str, Any]]


def calibrate(options: CalibrationOptions) -> dict[str, Any]:
    """Measure heads and write calibration.json into their folder; finished parts of a stopped run are kept.

    Raises:
        InUse: if another process writes the folder.
        HeadsError, TrainingError: on heads, a target or data that do not fit.
    """
    check_own_folder(options.heads, options.out)
    with writing_folder(options.out or options.heads, "--out" if options.out else "heads folder"):
        return _calibrate(options.model_copy(update={"heads": own_folder(options.heads, options.out)}))


def _calibrate(options: CalibrationOptions) -> dict[str, Any]:
    _warn_of_training_data(options)
    calibration = Calibration(options)
    path = Path(options.heads) / NAME
    essence = options.model_dump(mode="json", exclude={"out", "recommend", "device", "batch"})
    stamp = os.stat(Path(options.heads) / "model.safetensors").st_mtime_ns
    result = continued(path, {"options": essence, "heads_stamp": stamp, "parts": {}, "digests": {}})
    if result["parts"]:
        print(f"continues after {', '.join(result['parts'])}", flush=True)
    for name, part in kind_calibration(calibration.config.kind).PARTS.items():
        if name not in result["parts"]:
            print(f"measuring {name} ...", flush=True)
            result["parts"][name] = part(calibration)
            result["digests"][name] = digest(result["parts"][name])
            write_text(path, json.dumps(result) + "\n")
    chosen = recommend(calibration.config, result["parts"])
    if "num_speculative_tokens" in chosen:
        ranges = drafts_by_batch_size(calibration.config, result["parts"], chosen)
        chosen["calibration"] = {
            "device": calibration.device_name, "num_speculative_tokens_per_batch_size": ranges,
        }  # fmt: skip
    result = provenance(
        kind=calibration.config.kind, target=calibration.target.name, options=essence, heads_stamp=stamp,
        finished=True, parts=result["parts"], recommendation=chosen,
    )  # fmt: skip
    write_text(path, json.dumps(result, indent=1) + "\n")
    if options.recommend:
        _write_config(options.heads, calibration.config, calibration.tensors, chosen)
        result["heads_stamp"] = os.stat(Path(options.heads) / "model.safetensors").st_mtime_ns
        write_text(path, json.dumps(result, indent=1) + "\n")
    write_card(options.heads, result)
    return result


def _warn_of_training_data(options: CalibrationOptions) -> None:
    try:
        facts = provenance_of(options.heads)
    except HeadsError:
        return
    seen = trained_on(expand(options.data), facts.data_files, facts.options.get("data") or ())
    if seen:
        more = f" and {len(seen) - 1} more" if len(seen) > 1 else ""
        print(
            f"vllm-ppd: warning: these heads were trained on {place(seen[0])}{more}: what is measured on it flatters "
            "them; give --data that they have not seen",
            file=sys.stderr,
        )


def _write_config(folder: str, config: HeadsConfig, tensors: dict[str, torch.Tensor], chosen: dict[str, Any]) -> None:
    fields = {name: value for name, value in chosen.items() if name in type(config).model_fields}
    save_heads(folder, type(config).model_validate(config.model_dump() | fields), tensors)
