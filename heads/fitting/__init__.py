# SPDX-License-Identifier: Apache-2.0
"""The options of `ppd fit`, and the prompts that it lets a target answer."""
