# SPDX-License-Identifier: Apache-2.0
"""CP heads: module, training recipe, what calibration measures."""
