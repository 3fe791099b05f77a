# SPDX-License-Identifier: Apache-2.0
"""Files of records, and tokenizers that render them by a chat template."""

import json
from pathlib import Path
from typing import Any

import tiny

TEMPLATE = (
    "{% if messages[0].role != 'system' %}<system>be<|end|>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(path: str | Path, *records: Any) -> str:
    """Write records, a line each; returns the path."""
    Path(path).write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    return str(path)


def read(path: Path) -> list[Any]:
    """The records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def templated(template: str | None) -> Any:
    """The tiny models' tokenizer with a chat template."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer
