# SPDX-License-Identifier: Apache-2.0
"""On-policy data: the model's own greedy responses, generated through vLLM (ParaDecode, appendix C)."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_ppd.heads.checkpoint import write_text
from vllm_ppd.heads.training import TrainingError
from vllm_ppd.heads.training.corpus import documents, expand
from vllm_ppd.heads.training.options import TrainingOptions

ROUND = 256  # prompts generated between two writes


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
    state = json.loads(mark.read_text()) if mark.exists() else {"wanted": wanted, "prompts": 0, "bytes": 0}
    if state["wanted"] != wanted:
        raise TrainingError(f"{folder} holds responses of other options; delete it or give another --out")
    if state.get("finished"):
        return path
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # each would write the same file
        raise TrainingError(
            "on-policy responses are written by one process: run this command without torchrun first, stop it when "
            "training begins, and torchrun goes on from there"
        )
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    prompts = itertools.islice(_prompts(options, tokenizer, prompt_tokens), state["prompts"], None)
    engine = None
    with path.open("ab") as out, tqdm(desc="on-policy responses", initial=state["prompts"]) as progress:
        out.truncate(state["bytes"])
        while chunk := list(itertools.islice(prompts, ROUND)):
            engine = engine or _engine(options, prompt_tokens + response_tokens)
            for prompt, text in zip(chunk, _generate(engine, chunk, response_tokens), strict=True):
                whole = {"text": f"{tokenizer.decode(prompt)}{text}"}
                out.write((json.dumps(whole) + "\n").encode())
            out.flush()
            os.fsync(out.fileno())
            state |= {"prompts": state["prompts"] + len(chunk), "bytes": out.tell()}
            write_text(mark, json.dumps(state))
            progress.update(len(chunk))
    if not state["prompts"]:
        raise TrainingError(f"no document has {prompt_tokens} tokens for a prompt; give longer data or fewer tokens")
    write_text(mark, json.dumps(state | {"finished": True}))
    return path


def _prompts(options: TrainingOptions, tokenizer: Any, length: int) -> Iterator[list[int]]:
    """The beginnings of every stretch of a document that a prompt and its response would take."""
    for text in documents(expand(options.data), tokenizer):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for start in range(0, len(ids) - length + 1, 4 * length):
            yield ids[start : start + length]


def _engine(options: TrainingOptions, length: int) -> Any:
    from vllm import LLM

    return LLM(
        model=options.model, max_model_len=length + 8, seed=options.seed, dtype=options.precision,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip


def _generate(engine: Any, prompts: list[list[int]], tokens: int) -> list[str]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]
