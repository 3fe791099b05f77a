# SPDX-License-Identifier: Apache-2.0
"""ParaDecode's own schedule: deep and shallow layers of different tokens in the same products."""
