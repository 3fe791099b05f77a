# SPDX-License-Identifier: Apache-2.0
"""`ppd calibrate`: measure a heads folder, print tables like the papers', recommend a setting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ppd.heads.data.check import check_data

if TYPE_CHECKING:
    from vllm_ppd.heads.calibration.options import CalibrationOptions


def run(options: CalibrationOptions) -> int:
    check_data(options.data, options.prompts)  # torch takes seconds to import

    from vllm_ppd.heads.calibration.report import report
    from vllm_ppd.heads.calibration.run import calibrate
    from vllm_ppd.heads.io import CALIBRATION_NAME

    print(report(calibrate(options)))
    print(f"\nwrote {options.heads}/{CALIBRATION_NAME}")
    return 0
