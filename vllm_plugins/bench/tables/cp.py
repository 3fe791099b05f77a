# SPDX-License-Identifier: Apache-2.0
"""The tables of the paper on CP heads."""

from __future__ import annotations

from vllm_ppd.vllm_plugins.bench.tables import Measure

KIND = "cp"
TABLES: dict[str, Measure] = {}
