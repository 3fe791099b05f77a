# SPDX-License-Identifier: Apache-2.0
"""Measuring heads before they serve: match rates, joint likelihoods, expected drafts, seconds per layer."""
