# SPDX-License-Identifier: Apache-2.0
"""`ppd calibrate`: measure heads on texts of their target, and store the best setting."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_jsonable_python
from torch import Tensor

from vllm_ppd.heads.base import COUNTS_NAME, HeadsConfig
from vllm_ppd.heads.calibration.acceptance import Texts, generate, take_prompts
from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.errors import HeadsError, TrainingError
from vllm_ppd.heads.files import write_json, write_tensors, writing_folder
from vllm_ppd.heads.folder import (
    CALIBRATION_NAME,
    load_config,
    load_tensors,
    save_config,
)
from vllm_ppd.heads.hub import hub_name
from vllm_ppd.heads.kinds import KINDS, calibration_of
from vllm_ppd.heads.module import first_guess, most_frequent
from vllm_ppd.heads.options import CalibrationOptions
from vllm_ppd.heads.planning import Timing, advice, recommend
from vllm_ppd.heads.provenance import (
    data_files,
    provenance,
    provenance_of,
    shown_target,
    write_card,
)
from vllm_ppd.heads.target import (
    check_on_disk,
    check_reachable,
    check_target,
    find_target,
    fingerprint,
    stored_name,
)
from vllm_ppd.heads.text import in_words, quoted
from vllm_ppd.heads.training.target import Target, device_of

# Names in configurations of the number of experts
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass
class Calibration:
    """Heads on their target, and texts, each made when a part first asks."""

    options: CalibrationOptions
    config: Any  # of the heads
    tensors: dict[str, Tensor]  # of the heads
    target: Target

    def autocast(self) -> Any:
        """A context in which heads run in the target's arithmetic."""
        enabled = self.options.dtype == "bfloat16"
        return torch.autocast(
            self.target.device.type, torch.bfloat16, enabled=enabled
        )

    @cached_property
    def prompts(self) -> list[list[int]]:
        """The records' own, or pieces of their texts."""
        options = self.options
        longest = (self.target.max_length or 1 << 30) - options.output_len
        length = min(options.prompt_tokens, longest)
        return take_prompts(
            options.data, self.target, options.num_prompts, length, longest
        )

    @cached_property
    def greedy(self) -> Texts:
        return generate(self.target, self.prompts, self.options.output_len)

    @cached_property
    def sampled(self) -> Texts:
        options = self.options
        torch.manual_seed(options.seed)
        return generate(
            self.target, self.prompts, options.output_len, options.temperature
        )

    def texts(self) -> Iterator[tuple[str, Texts]]:
        """The greedy texts and the sampled ones, by the names that parts have for them."""
        yield "greedy", self.greedy
        yield f"T {self.options.temperature:g}", self.sampled

    def most_drafts(self, most: int) -> int:
        """How many drafts to measure of heads that make at most `most`."""
        return min(most, self.options.num_speculative_tokens or most)

    def timing(self) -> Timing:
        """The weights of the LM head relative to a pass, and of a d x d matrix relative
        to a layer. Of experts a pass reads those that a token is routed to.
        """
        config = self.target.config
        experts = max(getattr(config, name, None) or 0 for name in EXPERTS)
        routed = getattr(config, "num_experts_per_tok", experts)
        share = routed / experts if experts else 1.0
        layers = sum(
            tensor.numel() * (share if ".experts." in name else 1.0)
            for name, tensor in self.target.layers.named_parameters()
        )
        lm_head = self.target.unembedding.numel()
        matrix = self.target.hidden_size**2
        return Timing(
            lm_head_share=round(lm_head / (layers + lm_head), 4),
            transform_in_layers=round(
                matrix * self.target.num_layers / layers, 4
            ),
        )

    def draft_vocabulary(self) -> Tensor | None:
        """The token IDs of the heads' draft vocabulary, or of one that would do; None
        for the whole one.
        """
        name = self.config.counts_tensor
        if name is None:
            return None
        counts = self.tensors[name]
        size = self.config.draft_vocab_size or first_guess(counts)
        if size is None or size == self.target.vocab_size:
            return None
        return most_frequent(counts, size).to(self.target.device)


def parts_by_vocabulary(
    measure: Callable[..., Any],
) -> dict[str, Callable[[Calibration], Any]]:
    """The parts of heads that draft from a vocabulary, by their names in
    calibration.json.

    Args:
        measure: maps a calibration, texts and the token IDs of a draft vocabulary
            (None: the whole) to what is stored of them.
    """

    def acceptance(calibration: Calibration) -> dict[str, Any]:
        return {
            name: measure(calibration, texts, None)
            for name, texts in calibration.texts()
        }

    def vocabulary(calibration: Calibration) -> dict[int, Any]:
        token_ids = calibration.draft_vocabulary()
        if token_ids is None:
            return {}
        return {
            len(token_ids): measure(calibration, calibration.sampled, token_ids)
        }

    return {
        "timing": Calibration.timing,
        "acceptance": acceptance,
        "vocabulary": vocabulary,
    }


def checked(
    options: CalibrationOptions,
) -> tuple[HeadsConfig, dict[str, Tensor], str]:
    """The heads of a calibration, checked before their target loads, and the target's
    name.

    Raises:
        HeadsError: if they are damaged, if their target is not found, or if it is
            another model.
    """
    config, tensors = load_tensors(options.heads)
    name = options.model or find_target(config.verifier, options.heads)
    if options.model is None:
        check_reachable(name, options.heads, "set its folder with --model")
    check_on_disk(config, options.heads, name, options.trust_remote_code)
    return config, tensors, name


def open_calibration(options: CalibrationOptions) -> Calibration:
    """Load heads and their target.

    Raises:
        HeadsError: as checked.
        TrainingError: if the target cannot be loaded.
    """
    config, tensors, name = checked(options)
    dtype = getattr(torch, options.dtype)
    target = Target(
        name, device_of(options.device), dtype, options.trust_remote_code
    )
    # It may have been fetched only now.
    known = fingerprint(target.folder)
    other_weights = check_target(config, options.heads, target.config, known)
    if other_weights:
        print(f"vllm-ppd: warning: {other_weights}", file=sys.stderr)
    if target.max_length is not None and options.output_len >= target.max_length:
        raise TrainingError(
            f"--output-len {options.output_len} leaves no prompt of the model's "
            f"{target.max_length} tokens"
        )
    return Calibration(options, config, tensors, target)


def calibrate(options: CalibrationOptions) -> dict[str, Any]:
    """Measure heads, write calibration.json into their folder, and return its content.

    Raises:
        InUse: if another process writes the folder.
        HeadsError, TrainingError: on heads, a target or data that do not fit.
    """
    folder = options.heads
    if (name := hub_name(folder)) is not None:
        raise HeadsError(
            f"heads {quoted(folder)} are on the Hub and cannot be changed there; run "
            f"`hf download {name.repo} --local-dir DIR` and calibrate DIR"
        )
    load_config(folder)  # no lock is made in a folder without heads
    with writing_folder(folder, "heads folder"):
        _warn_of_training_data(options)
        calibration = open_calibration(options)
        if not calibration.config.names_target:
            _complete(calibration)
        config = calibration.config
        measured = {}
        for part, measure in calibration_of(config.kind).PARTS.items():
            print(f"measuring {part} ...", flush=True)
            measured[part] = to_jsonable_python(measure(calibration))
        chosen = recommend(config, config.parts.model_validate(measured))
        result = provenance(
            kind=config.kind,
            target=calibration.target.name,
            options=options.model_dump(
                mode="json", exclude={"recommend", "device"}
            ),
            finished=True,
            parts=measured,
            recommendation=chosen,
        )
        if options.recommend:
            save_recommended(folder, config, chosen)
        shown = report(result | {"target": shown_target(config)})
        write_card(folder, config, shown)
        write_json(Path(folder) / CALIBRATION_NAME, result)
    return result


def report(result: dict[str, Any], heads: str = "HEADS") -> str:
    """Markdown of a calibration: its tables, then the advice.

    Args:
        result: the content of calibration.json.
        heads: the folder, as it is served.
    """
    kind = result["kind"]
    target = result["target"]
    tables = calibration_of(kind).tables(
        KINDS[kind].parts.model_validate(result["parts"])
    )
    said = advice(heads, target, result["recommendation"])
    return "\n\n".join([f"{kind} heads for {target}", *tables, said])


def save_recommended(
    folder: str, config: HeadsConfig, chosen: dict[str, Any]
) -> None:
    """Write what was recommended into the heads' configuration."""
    known = config.model_dump()
    known |= {name: value for name, value in chosen.items() if name in known}
    save_config(folder, type(config).model_validate(known))


def _complete(calibration: Calibration) -> None:
    """Store what published heads lack: their target, and the counts of the data's tokens."""
    target = calibration.target
    config = calibration.config
    folder = Path(calibration.options.heads)
    counts = counts_of(calibration.options.data, target)
    write_tensors(folder / COUNTS_NAME, {"token_counts": counts})
    known = config.model_dump() | target.description()
    known["verifier"] = stored_name(target.name, folder)
    known["token_counts"] = True
    known["draft_vocab_size"] = first_guess(counts)
    calibration.config = type(config).model_validate(known)
    calibration.tensors["token_counts"] = counts
    save_config(folder, calibration.config)


def counts_of(data: Sequence[str], target: Target) -> Tensor:
    """How often each token occurs in data: [vocabulary] int64.

    What the model writes is counted, or all tokens if the data has prompts alone.
    """
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    for by_answer in (True, False):
        documents = Documents(data, target.tokenizer, by_answer=by_answer)
        for document in documents.tokens():
            ids = torch.tensor(document.ids, dtype=torch.int64)
            if by_answer and document.mask is not None:
                ids = ids[torch.tensor(document.mask, dtype=torch.bool)]
            counts += ids.bincount(minlength=target.vocab_size)
        if counts.any():
            break
    return counts


def _warn_of_training_data(options: CalibrationOptions) -> None:
    try:
        facts = provenance_of(options.heads)
    except HeadsError:
        return
    seen = [
        file["name"]
        for file in data_files(options.data)
        if file in facts.data_files
    ]
    if seen:
        print(
            f"vllm-ppd: warning: these heads were trained on {in_words(seen)}, "
            "so the results will be too optimistic; pass --data that was not used "
            "for training",
            file=sys.stderr,
        )
