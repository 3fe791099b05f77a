# SPDX-License-Identifier: Apache-2.0
"""The number of tokens to draft, chosen by step costs (measured once) and acceptance
(counted online).
"""
