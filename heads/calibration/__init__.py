# SPDX-License-Identifier: Apache-2.0
"""Measuring heads before they serve: the drafts that an engine will accept, and what they cost."""
