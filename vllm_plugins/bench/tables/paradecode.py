# SPDX-License-Identifier: Apache-2.0
"""ParaDecode's tables and figure."""

from __future__ import annotations

from vllm_ppd.vllm_plugins.bench.tables import Measure

KIND = "early"
TABLES: dict[str, Measure] = {}
