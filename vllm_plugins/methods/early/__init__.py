# SPDX-License-Identifier: Apache-2.0
"""Early drafting (PPD, ParaDecode): drafts are read at an exit layer, and the next step
completes their deeper KV.
"""
