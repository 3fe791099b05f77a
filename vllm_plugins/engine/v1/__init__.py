# SPDX-License-Identifier: Apache-2.0
"""vLLM's runner V1: worker, runner, and running a part of the target between steps."""
