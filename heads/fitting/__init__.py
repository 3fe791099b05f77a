# SPDX-License-Identifier: Apache-2.0
"""`ppd fit`, from a model to heads in a given time: its choices, its state, and the page at the end."""
