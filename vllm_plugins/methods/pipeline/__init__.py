# SPDX-License-Identifier: Apache-2.0
"""The PPD worker group: two pipeline stages, of which the first starts the next token while the last ends this one."""
