# SPDX-License-Identifier: Apache-2.0
"""On-policy data: the model's own greedy responses, generated through vLLM (ParaDecode, appendix C)."""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm import tqdm

from vllm_ppd.heads.data.documents import Documents
from vllm_ppd.heads.io import write_text
from vllm_ppd.heads.quote import place
from vllm_ppd.heads.training import TrainingError
from vllm_ppd.heads.training.options import TrainingOptions
from vllm_ppd.vllm_plugins.integration import platform

ROUND = 256  # prompts generated between two writes


class Progress(BaseModel):
    """done.json: what of responses.jsonl is whole."""

    model_config = ConfigDict(extra="forbid")

    wanted: list[Any]
    prompts: int = Field(default=0, ge=0)
    bytes: int = Field(default=0, ge=0)
    crc32: int | None = None  # of these bytes (None: of an earlier version)
    finished: bool = False


def write_responses(options: TrainingOptions, folder: Path, prompt_tokens: int, response_tokens: int) -> Path:
    """Write responses.jsonl ({"text": prompt + response} a line); a stopped run goes on after its last whole round.

    Args:
        options: model, data and seed of the training run.
        folder: where the file is kept.
        prompt_tokens: tokens of each document that are the prompt.
        response_tokens: most tokens generated after it.

    Raises:
        TrainingError: if no document is long enough, or if several processes would write responses.
    """
    from transformers import AutoTokenizer

    path, mark = folder / "responses.jsonl", folder / "done.json"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [options.model, list(options.data), prompt_tokens, response_tokens]
    state = _progress(mark, wanted)
    if state.wanted != wanted:
        raise TrainingError(f"{folder} holds responses of other options; delete it or give another --out")
    _check_written(path, state)
    if state.finished:
        return path
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # each would write the same file
        raise TrainingError(
            "on-policy responses are written by one process: run this command without torchrun first, stop it when "
            "training begins, and torchrun goes on from there"
        )
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    documents = Documents(options.data, lambda: tokenizer)
    prompts = itertools.islice(_prompts(documents, prompt_tokens), state.prompts, None)
    engine = None
    with path.open("ab") as out, tqdm(desc="on-policy responses", initial=state.prompts) as progress:
        out.truncate(state.bytes)
        while chunk := list(itertools.islice(prompts, ROUND)):
            engine = engine or _engine(options, prompt_tokens + response_tokens)
            written = b""
            for prompt, text in zip(chunk, _generate(engine, chunk, response_tokens), strict=True):
                # The special tokens around a prompt are put there again when the text is read.
                whole = {"text": f"{tokenizer.decode(documents.special.bare(prompt))}{text}"}
                written += (json.dumps(whole) + "\n").encode()
            out.write(written)
            out.flush()
            os.fsync(out.fileno())
            state.prompts, state.bytes = state.prompts + len(chunk), state.bytes + len(written)
            state.crc32 = zlib.crc32(written, state.crc32 or 0)
            write_text(mark, state.model_dump_json())
            progress.update(len(chunk))
    if not state.prompts:
        skips = f" ({documents.skips()})" if documents.skipped else ""
        raise TrainingError(
            f"no document has {prompt_tokens} tokens for a prompt{skips}; give longer data or fewer tokens"
        )
    state.finished = True
    write_text(mark, state.model_dump_json())
    return path


def _progress(mark: Path, wanted: list[Any]) -> Progress:
    """What done.json says; nothing is done where it is missing."""
    if not mark.exists():
        return Progress(wanted=wanted)
    try:
        return Progress.model_validate_json(mark.read_bytes())
    except ValidationError:
        raise _damaged(mark) from None


def _check_written(path: Path, state: Progress) -> None:
    """Refuse responses that are not those done.json speaks of; what was written after them is cut off later."""
    found, left = 0, state.bytes
    if left:
        if not path.is_file():
            raise _damaged(path)
        with path.open("rb") as file:
            while chunk := file.read(min(left, 1 << 20)):
                found, left = zlib.crc32(chunk, found), left - len(chunk)
    if left or state.crc32 not in (None, found) or (state.finished and path.stat().st_size != state.bytes):
        raise _damaged(path)
    state.crc32 = found


def _damaged(path: Path) -> TrainingError:
    return TrainingError(
        f"{place(path)} is damaged; delete the folder {path.parent.name} there to write the responses again"
    )


def _prompts(documents: Documents, length: int) -> Iterator[list[int]]:
    """The beginnings of every stretch of a document that a prompt and its response would take."""
    for ids in documents.token_ids():
        yield from documents.special.pieces(ids, length, stride=4)


def _engine(options: TrainingOptions, length: int) -> Any:
    return platform.offline_engine(
        model=options.model, max_model_len=length + 8, seed=options.seed, dtype=options.precision,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip


def _generate(engine: Any, prompts: list[list[int]], tokens: int) -> list[str]:
    # Given as parameters, these are not vLLM's defaults, which follow the model's generation_config.json.
    params = platform.sampling_params(temperature=0, max_tokens=tokens)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]
