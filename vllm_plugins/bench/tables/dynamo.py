# SPDX-License-Identifier: Apache-2.0
"""DynaMo's tables and figures."""

from __future__ import annotations

from vllm_ppd.vllm_plugins.bench.tables import Measure

KIND = "dynamo"
TABLES: dict[str, Measure] = {}
