# SPDX-License-Identifier: Apache-2.0
"""Choice of the requests that draft, prompt lookup, and the watch on acceptance."""
