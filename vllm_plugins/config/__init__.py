# SPDX-License-Identifier: Apache-2.0
"""Options: flags, checks, defaults by target, activation in vLLM's arguments, and
options of requests.
"""
