# SPDX-License-Identifier: Apache-2.0
"""`ppd data`: chats that the target itself writes, to train heads on."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.quote import place
from vllm_ppd.vllm_plugins.cli.arguments import add_fields, options_from

if TYPE_CHECKING:
    from vllm_ppd.heads.generation.options import DataOptions
    from vllm_ppd.heads.generation.output import ChatFile
    from vllm_ppd.heads.generation.write import Writer

NUMBER = 1000  # chats where neither a number nor prompts are given


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "data", help="let the target write training data",
        description="Let the target answer prompts, or write user turns and answer them; token ids are kept.",
        add_arguments=_add_arguments,
    )  # fmt: skip
    parser.set_defaults(run=run)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    from vllm_ppd.heads.generation.options import DataOptions

    add_fields(parser, DataOptions)


def run(args: argparse.Namespace) -> int:
    from vllm_ppd.heads.generation.options import DataOptions
    from vllm_ppd.heads.generation.output import ChatFile

    options = options_from(DataOptions, args)
    check_data(options.prompts)  # vLLM takes seconds to import
    file = ChatFile(Path(options.out), options.essence())
    write_chats(options, file)
    print(f"{options.out}: {file.count:,} chats, {file.tokens:,} tokens with their prompts")
    return 0


def write_chats(options: DataOptions, file: ChatFile) -> None:
    """Write the chats that the file lacks."""
    from transformers import AutoTokenizer

    from vllm_ppd.heads.generation.prompts import read_prompts
    from vllm_ppd.heads.generation.template import ChatTemplate
    from vllm_ppd.heads.generation.write import ChatWriter, PromptWriter
    from vllm_ppd.vllm_plugins.engine.generation import OfflineEngine

    wanted = options.number or (math.inf if options.prompts else NUMBER)
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    template = None if options.prompts else ChatTemplate(tokenizer, options.system)
    with file:
        seen = {template.key(chat.prompt_token_ids) if template else b"" for chat in file.read()}
        if file.count >= wanted:
            return
        if file.count:
            continued = f"continues after {file.count:,} chats, {file.tokens:,} tokens with their prompts"
            print(f"vllm-ppd: {place(file.path)} {continued}", file=sys.stderr, flush=True)
        with _Bar(file, wanted) as bar:
            engine = OfflineEngine(options)
            bar.start()
            if template is None:
                PromptWriter(options, engine, file, bar.show).answer(read_prompts(options, tokenizer), wanted)
            else:
                ChatWriter(options, engine, file, bar.show).converse(template, seen, int(wanted))


class _Bar:
    """Chats that have ended, and tokens as they are generated; seldom where nobody watches."""

    def __init__(self, file: ChatFile, wanted: float) -> None:
        every = 0.5 if sys.stderr.isatty() else 20
        total = None if math.isinf(wanted) else int(wanted)
        self._bar = tqdm(
            desc="writing chats", initial=file.count, total=total, unit=" chats", mininterval=every, miniters=0
        )
        self._started, self._has_shown = 0.0, False

    def __enter__(self) -> _Bar:
        self._bar.set_postfix_str("loading the model")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def start(self) -> None:
        """Count seconds from now on."""
        self._started = time.monotonic()
        self._bar.set_postfix_str("0 tokens")

    def show(self, writer: Writer) -> None:
        """Tell what the engine has generated in this run, user turns included."""
        tokens = writer.engine.generated
        rate = tokens / max(time.monotonic() - self._started, 1e-3)
        self._bar.set_postfix_str(f"{tokens:,} tokens, {rate:.0f}/s, {writer.open} begun", refresh=not self._has_shown)
        self._has_shown = True
        self._bar.update(writer.file.count - self._bar.n)
