# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr."""

import sys
from typing import TextIO

from tqdm import tqdm as Bar

__all__ = ["Bar", "say"]


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line to stderr, or to a file, without breaking a bar."""
    Bar.write(text, file=file or sys.stderr)
