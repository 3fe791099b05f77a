# SPDX-License-Identifier: Apache-2.0
"""Before anything imports vLLM."""

import interpreter

interpreter.prepare()
