# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: workarounds, and passes padded to the number of rows that it is fastest at."""
