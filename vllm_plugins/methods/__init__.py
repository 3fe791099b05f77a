# SPDX-License-Identifier: Apache-2.0
"""The drafting methods, each in a folder."""
