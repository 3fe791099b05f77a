# SPDX-License-Identifier: Apache-2.0
"""`ppd bench acceptance`: whether greedy text is vLLM's own, and how many drafts are accepted at which cost."""
