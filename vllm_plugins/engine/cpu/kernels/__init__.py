# SPDX-License-Identifier: Apache-2.0
"""The kernels of vLLM's model runner V2 in numpy and torch, for a CPU without Triton.

A function takes the arguments of the kernel it replaces, in the kernel's order. It
drops what Triton alone needs, such as block sizes and warps. Each is compared with
vLLM's kernel, which runs in Triton's interpreter (tests/v2_kernels).

The functions read and write tables of requests as numpy views of the tensors' memory:
at these sizes a call of numpy costs a third of torch's. `rows` maps a place in the
batch to a row of these tables, -1 for padding.
"""
