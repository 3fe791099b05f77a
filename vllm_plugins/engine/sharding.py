# SPDX-License-Identifier: Apache-2.0
"""When tensor-parallel ranks divide a matrix of the heads among them.

Ranks that hold a whole matrix each read all of it. Ranks that hold parts read their
part, and one collective joins what they computed. A step of few requests takes as long
as its bytes and its collectives, so a matrix is divided if that saves more seconds of
reading than the collective takes. More requests change nothing: a rank's part of the
products shrinks faster than what it sends grows.
"""

# An H100 reads 3.35 TB/s. A slower memory gains more than is counted here.
BYTES_PER_SECOND = 3e12
# vLLM's all-reduce of a few rows over NVLink takes 8 to 15 us, NCCL's all-gather 15 to 20
SECONDS_PER_COLLECTIVE = 15e-6


def pays(read: int, ranks: int) -> bool:
    """Whether ranks that read so many bytes each should read a part each and
    communicate once.
    """
    saved = read - read / ranks
    return saved / BYTES_PER_SECOND > SECONDS_PER_COLLECTIVE
