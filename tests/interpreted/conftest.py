# SPDX-License-Identifier: Apache-2.0
"""Engines that run Triton kernels of ours: on a GPU, or in Triton's interpreter in a
process of their own.

tests/engine/test_interpreter.py starts that process.
"""

import os

import interpreter

if not os.path.exists("/dev/nvidiactl"):
    interpreter.prepare()
