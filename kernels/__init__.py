# SPDX-License-Identifier: Apache-2.0
"""Pure tensor functions: each has a torch reference, and a faster kernel beside it if one pays."""
