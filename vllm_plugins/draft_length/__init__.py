# SPDX-License-Identifier: Apache-2.0
"""How many tokens to draft: step costs measured once, acceptance counted online, and the number chosen by both."""
