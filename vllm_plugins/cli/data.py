# SPDX-License-Identifier: Apache-2.0
"""`ppd data`: chats that the target itself writes, to train heads on."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.errors import loading
from vllm_ppd.heads.progress import Bar, say
from vllm_ppd.heads.quote import place

if TYPE_CHECKING:
    from vllm_ppd.heads.generation.options import DataOptions
    from vllm_ppd.heads.generation.output import ChatFile
    from vllm_ppd.heads.generation.write import Engine, Writer
    from vllm_ppd.vllm_plugins.engine.generation import OfflineEngine

NUMBER = 1000  # chats to write if neither a number nor prompts are given


def run(options: DataOptions) -> int:
    check_data(options.prompts)  # vLLM takes seconds to import
    file = write_chats(options)
    print(f"{options.out}: {file.count:,} chats, {file.tokens:,} tokens with their prompts")
    return 0


def write_chats(
    options: DataOptions, engine_of: Callable[[DataOptions], Engine] | None = None,
    watch: Callable[[Writer], None] | None = None,
) -> ChatFile:  # fmt: skip
    """Write the chats that a file lacks: answers to prompts, chats that the model begins, or whole texts.

    Args:
        options: of `ppd data`.
        engine_of: makes the engine, called only if there is anything to write (None: vLLM's).
        watch: called after every step of the engine; if options have no number, it decides when to end.

    Returns:
        The file, closed.
    """
    from transformers import AutoTokenizer

    from vllm_ppd.heads.generation.output import ChatFile
    from vllm_ppd.heads.generation.prompts import ChatTemplate, beginning, read_prompts
    from vllm_ppd.heads.generation.write import ChatWriter, Writer

    with loading(options.model):
        tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    template, prompts = None, read_prompts(options, tokenizer)
    if not options.prompts and getattr(tokenizer, "chat_template", None):
        template = ChatTemplate(tokenizer, options.system)
    elif not options.prompts:
        prompts = itertools.repeat(beginning(tokenizer))
    wanted = options.number or (math.inf if options.prompts or watch else NUMBER)
    with ChatFile(Path(options.out), options.essence()) as file:
        seen = {template.key(chat.prompt_token_ids) if template else b"" for chat in file.read()}
        if file.count >= wanted:
            return file
        if file.count:
            written = f"{file.count:,} chats, {file.tokens:,} tokens with their prompts"
            say(f"vllm-ppd: {place(file.path)} continues after {written}")
        with progress_bar(file, wanted) as bar:
            engine = vllm_engine(options) if engine_of is None else engine_of(options)
            report = reporter(bar, engine.generated, watch)
            if template is None:
                Writer(options, engine, file, report).answer(prompts, wanted)
            else:
                ChatWriter(options, engine, file, report).converse(template, seen, wanted)
    return file


def vllm_engine(options: DataOptions) -> OfflineEngine:
    """vLLM's engine, which takes seconds to import."""
    from vllm_ppd.vllm_plugins.engine.generation import OfflineEngine

    return OfflineEngine(options)


def progress_bar(file: ChatFile, wanted: float) -> Bar:
    """A bar of finished chats, drawn every 20 seconds if stderr is not a terminal."""
    bar = Bar(
        desc="writing chats", initial=file.count, total=None if math.isinf(wanted) else int(wanted), unit=" chats",
        mininterval=0.5 if sys.stderr.isatty() else 20, miniters=0,
    )  # fmt: skip
    bar.set_postfix_str("loading the model")
    return bar


def reporter(bar: Bar, before: int = 0, watch: Callable[[Writer], None] | None = None) -> Callable[[Writer], None]:
    """A function that shows the tokens generated from now on, including user turns, and then calls another."""
    started, is_first = time.monotonic(), True
    bar.set_postfix_str("0 tokens")

    def report(writer: Writer) -> None:
        nonlocal is_first
        tokens = writer.engine.generated - before
        rate = tokens / max(time.monotonic() - started, 1e-3)
        bar.set_postfix_str(f"{tokens:,} tokens, {rate:.0f}/s, {writer.open} begun", refresh=is_first)
        is_first = False
        bar.update(writer.file.count - bar.n)
        if watch is not None:
            watch(writer)

    return report
