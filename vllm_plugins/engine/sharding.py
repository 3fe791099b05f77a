# SPDX-License-Identifier: Apache-2.0
"""When tensor-parallel ranks divide a matrix of the heads among them.

Ranks that hold a whole matrix each read all of it. Ranks that hold a part read the
part, and one collective joins what they computed. A step of few requests takes as long
as its bytes and its collectives, so a matrix is divided if reading less saves more
seconds than the collective takes. In larger batches a collective sends more, but a rank
multiplies less, and over NVLink this saves more than that costs.
"""

# Estimates, not measured. An H100's memory has 3.35 TB/s; with a slower one dividing
# gains more than is counted.
BYTES_PER_SECOND = 3e12
# An all-reduce or all-gather of a few rows over NVLink, in a CUDA graph
SECONDS_PER_COLLECTIVE = 15e-6


def pays(read: int, ranks: int) -> bool:
    """Whether ranks that read so many bytes each should read a part each and
    communicate once.
    """
    saved = read - read / ranks
    return saved / BYTES_PER_SECOND > SECONDS_PER_COLLECTIVE
