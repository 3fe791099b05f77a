# SPDX-License-Identifier: Apache-2.0
"""`ppd data`: chats that the target itself writes, to train heads on."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.quote import place

if TYPE_CHECKING:
    from vllm_ppd.heads.generation.options import DataOptions
    from vllm_ppd.heads.generation.output import ChatFile
    from vllm_ppd.heads.generation.prompts import ChatTemplate
    from vllm_ppd.heads.generation.write import Writer

NUMBER = 1000  # chats where neither a number nor prompts are given


def run(options: DataOptions) -> int:
    check_data(options.prompts)  # vLLM takes seconds to import

    from transformers import AutoTokenizer

    from vllm_ppd.heads.generation.output import ChatFile
    from vllm_ppd.heads.generation.prompts import ChatTemplate

    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    template = None if options.prompts else ChatTemplate(tokenizer, options.system)
    with ChatFile(Path(options.out), options.essence()) as file:
        write_chats(options, file, tokenizer, template)
    print(f"{options.out}: {file.count:,} chats, {file.tokens:,} tokens with their prompts")
    return 0


def write_chats(options: DataOptions, file: ChatFile, tokenizer: Any, template: ChatTemplate | None) -> None:
    """Write the chats that an open file lacks, from prompts, or from user turns where there is a template."""
    from vllm_ppd.heads.generation.prompts import read_prompts
    from vllm_ppd.heads.generation.write import ChatWriter, Writer
    from vllm_ppd.vllm_plugins.engine.generation import OfflineEngine

    wanted = options.number or (NUMBER if template else math.inf)
    seen = {template.key(chat.prompt_token_ids) if template else b"" for chat in file.read()}
    if file.count >= wanted:
        return
    if file.count:
        written = f"{file.count:,} chats, {file.tokens:,} tokens with their prompts"
        print(f"vllm-ppd: {place(file.path)} continues after {written}", file=sys.stderr, flush=True)
    with progress_bar(file, wanted) as bar:
        engine = OfflineEngine(options)
        report = reporter(bar)
        if template is None:
            Writer(options, engine, file, report).answer(read_prompts(options, tokenizer), wanted)
        else:
            ChatWriter(options, engine, file, report).converse(template, seen, int(wanted))


def progress_bar(file: ChatFile, wanted: float) -> tqdm:
    """A bar of the chats that have ended, which is drawn every 20 seconds where stderr is not a terminal."""
    bar = tqdm(
        desc="writing chats", initial=file.count, total=None if math.isinf(wanted) else int(wanted), unit=" chats",
        mininterval=0.5 if sys.stderr.isatty() else 20, miniters=0,
    )  # fmt: skip
    bar.set_postfix_str("loading the model")
    return bar


def reporter(bar: tqdm) -> Callable[[Writer], None]:
    """A function that shows what the engine has generated from now on, user turns included."""
    started, is_first = time.monotonic(), True
    bar.set_postfix_str("0 tokens")

    def report(writer: Writer) -> None:
        nonlocal is_first
        tokens = writer.engine.generated
        rate = tokens / max(time.monotonic() - started, 1e-3)
        bar.set_postfix_str(f"{tokens:,} tokens, {rate:.0f}/s, {writer.open} begun", refresh=is_first)
        is_first = False
        bar.update(writer.file.count - bar.n)

    return report
