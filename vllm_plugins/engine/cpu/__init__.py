# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: the kernels of vLLM's model runner V2 in numpy and torch, for a CPU
without Triton, and workarounds.

A kernel takes vLLM's parameters by their names, without `_ptr`, and only those that it
needs: none that Triton alone needs, such as block sizes and warps. Each is compared with
vLLM's kernel, which runs in Triton's interpreter (tests/v2_kernels).

The kernels read and write tables of requests as numpy views of the tensors' memory: at
these sizes a call of numpy costs a third of torch's. `rows` maps a place in the batch to
a row of these tables, -1 for padding.
"""
