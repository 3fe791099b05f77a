# SPDX-License-Identifier: Apache-2.0
"""DynaMo drafting: token heads beside the target's last layer, and the joint over their tokens."""
