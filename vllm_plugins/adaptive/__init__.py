# SPDX-License-Identifier: Apache-2.0
"""As many drafts as pay: what they cost and how many are accepted, as measured, and what is chosen by it."""
