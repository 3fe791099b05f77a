# SPDX-License-Identifier: Apache-2.0
"""Pure tensor functions: each has a torch reference, and a Triton kernel where that is faster."""
