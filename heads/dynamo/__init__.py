# SPDX-License-Identifier: Apache-2.0
"""DynaMo token heads: module, joint, co-occurrence, training recipe, what calibration measures."""
