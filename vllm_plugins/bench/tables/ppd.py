# SPDX-License-Identifier: Apache-2.0
"""PPD's tables and figures."""

from __future__ import annotations

from vllm_ppd.vllm_plugins.bench.tables import Measure

KIND = "early"
TABLES: dict[str, Measure] = {}
