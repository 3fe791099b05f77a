# SPDX-License-Identifier: Apache-2.0
"""Calibrate a heads folder: measure parts, each stored when it is finished, then print tables and recommend."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic_core import to_jsonable_python

from vllm_ppd.heads.base import HeadsConfig
from vllm_ppd.heads.calibration.options import CalibrationOptions
from vllm_ppd.heads.calibration.report import report
from vllm_ppd.heads.calibration.session import Calibration
from vllm_ppd.heads.card import shown_target, write_card
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.data.files import expand
from vllm_ppd.heads.errors import HeadsError, MissingFile, TrainingError
from vllm_ppd.heads.files import check_is_folder, digest_of_value, read_json_object, write_tensors, write_text
from vllm_ppd.heads.hub import hub_name
from vllm_ppd.heads.io import CALIBRATION_NAME, LONGEST_CALIBRATION, load_tensors, parts_of, save_config
from vllm_ppd.heads.kinds import calibration_of
from vllm_ppd.heads.locking import writing_folder
from vllm_ppd.heads.planning.recommend import drafts_by_batch_size, recommend
from vllm_ppd.heads.progress import say
from vllm_ppd.heads.quote import place, quoted
from vllm_ppd.heads.target import check_on_disk, check_reachable, check_target, find_target, fingerprint, stored_name
from vllm_ppd.heads.training.parallel import device_of
from vllm_ppd.heads.training.provenance import provenance, provenance_of, trained_on
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.weight_files import COUNTS_NAME, file_names


def checked(options: CalibrationOptions) -> tuple[HeadsConfig, dict[str, torch.Tensor], str]:
    """The heads of a calibration, checked before their target loads, and the target's name.

    Raises:
        HeadsError: if they are damaged, if their target is not found, or if it is another model.
    """
    config, tensors = load_tensors(options.heads)
    name = options.model or find_target(config.verifier, options.heads)
    if options.model is None:
        check_reachable(name, options.heads, "give its folder with --target")
    check_on_disk(config, options.heads, name, options.trust_remote_code, strict=True)
    return config, tensors, name


def open_calibration(options: CalibrationOptions) -> Calibration:
    """Load heads and their target.

    Raises:
        HeadsError: as checked.
        TrainingError: if the target cannot be loaded.
    """
    config, tensors, name = checked(options)
    dtype = getattr(torch, options.precision)
    target = Target(name, device_of(options.device), dtype, options.trust_remote_code)
    check_target(
        config, options.heads, hidden_size=target.hidden_size, vocab_size=target.vocab_size,
        num_hidden_layers=target.num_layers, fingerprint=fingerprint(target.folder), strict=True,
    )  # fmt: skip
    if target.max_length is not None and options.new_tokens >= target.max_length:
        raise TrainingError(
            f"--new-tokens {options.new_tokens} leave no prompt of the model's {target.max_length} tokens"
        )
    return Calibration(options, config, tensors, target)


def calibrate(options: CalibrationOptions) -> dict[str, Any]:
    """Measure heads and write calibration.json into their folder; a stopped run continues after its finished parts.

    Raises:
        InUse: if another process writes the folder.
        HeadsError, TrainingError: on heads, a target or data that do not fit.
    """
    if (name := hub_name(options.heads)) is not None:
        raise HeadsError(
            f"heads {quoted(options.heads)} are on the Hub and cannot be changed there; run `hf download {name.repo} "
            "--local-dir DIR` and calibrate DIR"
        )
    check_is_folder(options.heads)
    with writing_folder(options.heads, "heads folder"):
        return _calibrate(options)


def _calibrate(options: CalibrationOptions) -> dict[str, Any]:
    _warn_of_training_data(options)
    calibration = open_calibration(options)
    if not calibration.config.names_target:
        _complete(calibration)
    config, path = calibration.config, Path(options.heads) / CALIBRATION_NAME
    essence = options.model_dump(mode="json", exclude={"recommend", "device", "batch"})
    result = unfinished(path, {"options": essence, "heads_stamp": _stamp(options.heads), "parts": {}, "digests": {}})
    if result["parts"]:
        say(f"continues after {', '.join(result['parts'])}", sys.stdout)
    for name, measure in calibration_of(config.kind).PARTS.items():
        if name not in result["parts"]:
            say(f"measuring {name} ...", sys.stdout)
            result["parts"][name] = to_jsonable_python(measure(calibration))
            result["digests"][name] = digest_of_value(result["parts"][name])
            write_text(path, json.dumps(result) + "\n")
    parts = parts_of(config, result["parts"], path)
    chosen = recommend(config, parts)
    if "num_speculative_tokens" in chosen:
        chosen["calibration"] = {
            "device": calibration.device_name,
            "num_speculative_tokens_per_batch_size": drafts_by_batch_size(config, parts, chosen),
        }
    result = provenance(
        kind=config.kind, target=calibration.target.name, options=essence, heads_stamp=result["heads_stamp"],
        finished=True, parts=result["parts"], recommendation=chosen,
    )  # fmt: skip
    if options.recommend:
        save_recommended(options.heads, config, chosen)
    write_card(options.heads, config, report(result | {"target": shown_target(config)}))
    write_text(path, json.dumps(result, indent=1) + "\n")  # last: `finished` ends the calibration
    return result


def _complete(calibration: Calibration) -> None:
    """Store what published heads lack: their target, and the counts of the data's tokens."""
    target, config, folder = calibration.target, calibration.config, Path(calibration.options.heads)
    counts = counts_of(calibration.options.data, target, by_answer=True)
    if not counts.any():  # prompts alone
        counts = counts_of(calibration.options.data, target, by_answer=False)
    write_tensors(folder / COUNTS_NAME, {"token_counts": counts}, {"format": "pt"})
    known = target.description() | {"token_counts": True, "verifier": stored_name(target.name, folder)}
    known["target"] = known["target"].model_dump()
    calibration.config = type(config).model_validate(config.model_dump() | known)
    calibration.tensors["token_counts"] = counts
    save_config(folder, calibration.config)


def counts_of(data: Sequence[str], target: Target, by_answer: bool) -> torch.Tensor:
    """How often each token occurs in data: [vocabulary] int64.

    Args:
        data: files and folders.
        target: whose tokenizer reads them.
        by_answer: count only what the model writes.
    """
    counts = np.zeros(target.vocab_size, np.int64)
    documents = Documents(data, lambda: target.tokenizer, report=False, by_answer=by_answer)
    for document in documents.tokens():
        ids = np.array(document.ids, np.int64)
        if by_answer and document.mask is not None:
            ids = ids[np.array(document.mask, np.bool_)]
        counts += np.bincount(ids, minlength=target.vocab_size)
    return torch.from_numpy(counts)


def _stamp(folder: str) -> int:
    """An identity of the weights, by which those of an earlier run are recognised."""
    return max(os.stat(Path(folder) / name).st_mtime_ns for name in file_names(folder))


def unfinished(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """The stored result, if it is unfinished and of the same options and heads, with its sound parts; or `fresh`."""
    try:
        stored = read_json_object(path, LONGEST_CALIBRATION, "it is measured again")
    except MissingFile:
        return fresh
    except HeadsError as error:
        print(error)
        return fresh
    options, parts = stored.get("options"), stored.get("parts")
    # An option that the file lacks was added later, together with the part that reads it.
    alike = isinstance(options, dict) and fresh["options"] | options == fresh["options"]
    if stored.get("finished") or not alike or stored.get("heads_stamp") != fresh["heads_stamp"]:
        return fresh
    digests = stored.get("digests")
    if not isinstance(parts, dict) or not isinstance(digests, dict):
        return fresh
    sound = {name: content for name, content in parts.items() if digests.get(name) == digest_of_value(content)}
    return fresh | {"parts": sound, "digests": {name: digests[name] for name in sound}}


def _warn_of_training_data(options: CalibrationOptions) -> None:
    try:
        facts = provenance_of(options.heads)
    except HeadsError:
        return
    seen = trained_on(expand(options.data), facts.data_files, facts.options.get("data") or ())
    if seen:
        more = f" and {len(seen) - 1} more" if len(seen) > 1 else ""
        print(
            f"vllm-ppd: warning: these heads were trained on {place(seen[0])}{more}, so the results will be too "
            "optimistic; give --data that was not used for training",
            file=sys.stderr,
        )


def save_recommended(folder: str, config: HeadsConfig, chosen: dict[str, Any]) -> None:
    """Write what was recommended into the heads' configuration."""
    fields = {name: value for name, value in chosen.items() if name in type(config).model_fields}
    save_config(folder, type(config).model_validate(config.model_dump() | fields))
