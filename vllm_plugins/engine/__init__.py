# SPDX-License-Identifier: Apache-2.0
"""With model_patches/ the only code of the plugin that reads vLLM's internals."""
