# SPDX-License-Identifier: Apache-2.0
"""Options: flags, checks, defaults of one target, activation in vLLM's arguments, options of a single request."""
