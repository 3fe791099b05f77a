# SPDX-License-Identifier: Apache-2.0
"""Early drafting (PPD, ParaDecode): drafts at an exit layer, deep KV completed in the next step."""
