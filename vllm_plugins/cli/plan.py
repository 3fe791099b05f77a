# SPDX-License-Identifier: Apache-2.0
"""`ppd plan`: what drafting will gain on a machine and under a load, and how to serve it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ppd.heads.planning.options import PlanOptions


def run(options: PlanOptions) -> int:
    from vllm_ppd.heads.planning.plan import make_plan
    from vllm_ppd.heads.planning.report import report

    print(report(make_plan(options), options))
    return 0
