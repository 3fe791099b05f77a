# SPDX-License-Identifier: Apache-2.0
"""Pure tensor functions: each has a torch reference; a faster kernel stands beside it where one pays."""
