# SPDX-License-Identifier: Apache-2.0
"""`ppd bench acceptance`: whether greedy text equals vLLM's, and accepted drafts with their cost."""
