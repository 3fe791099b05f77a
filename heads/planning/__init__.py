# SPDX-License-Identifier: Apache-2.0
"""Predicting what drafting gains on a machine and under a load, from a calibration."""
