# SPDX-License-Identifier: Apache-2.0
"""CP drafting: the next n tokens from the last hidden state, as a mixture of r experts."""
