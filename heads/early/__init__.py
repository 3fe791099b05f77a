# SPDX-License-Identifier: Apache-2.0
"""Early heads: module, training recipe, what calibration measures."""
