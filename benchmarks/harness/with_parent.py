# SPDX-License-Identifier: Apache-2.0
"""Run a command that ends when its parent does, however that ends: PARENT COMMAND..."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux; it lasts through exec


def command(words: list[str]) -> list[str]:
    """The command that runs these words as a child of this process."""
    return [sys.executable, "-m", __name__, str(os.getpid()), *words]


def main(parent: str, *words: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("the parent has ended")
    os.execv(words[0], words)


if __name__ == "__main__":
    main(*sys.argv[1:])
