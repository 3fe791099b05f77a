# SPDX-License-Identifier: Apache-2.0
"""Predictions of the gain of drafting on a machine and under a load, from a calibration."""
