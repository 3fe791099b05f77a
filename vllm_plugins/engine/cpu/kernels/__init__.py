# SPDX-License-Identifier: Apache-2.0
"""The kernels of vLLM's model runner V2 in numpy and torch, for a CPU without Triton.

A function here takes the arguments of the kernel it replaces, in the kernel's order; what Triton alone needs (block
sizes, warps) is dropped. Each is compared with vLLM's kernel in Triton's interpreter by tests/v2_kernels.

Tables of requests are read and written as numpy views of the tensors' memory: a call of numpy costs a third of torch's
at these sizes. `rows` maps a place in the batch to a row of the requests' tables, -1 for padding.
"""
