# SPDX-License-Identifier: Apache-2.0
"""The only code of the plugin that reads vLLM's internals, together with model_patches/."""
