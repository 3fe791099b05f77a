# SPDX-License-Identifier: Apache-2.0
"""`ppd plan`: what drafting will gain on a machine and under a load, and how to serve it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ppd.heads.planning.options import PlanOptions


def run(options: PlanOptions) -> int:
    from vllm_ppd.heads.planning.plan import make_fleets, make_plan
    from vllm_ppd.heads.planning.report import fleet_report, report

    if options.latency is None:
        print(report(make_plan(options), options))
    else:
        print(fleet_report(*make_fleets(options), options))
    return 0
