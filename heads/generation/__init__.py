# SPDX-License-Identifier: Apache-2.0
"""On-policy data: chats that the target itself writes, kept as token IDs."""
