# SPDX-License-Identifier: Apache-2.0
"""What the paper on CP heads prints (Basharin et al.): Tables 1 to 3, by rank."""

from __future__ import annotations

# Table 1, tiny transformer trained from scratch on TinyStories: loss, average draft tokens accepted, seconds a token.
FROM_SCRATCH = {1: (3.23, 1.67, 0.0336), 3: (2.88, 2.01, 0.0328), 5: (2.69, 2.07, 0.0303), 8: (2.66, 2.15, 0.0326)}

# Table 2, PyCodeGPT, the head alone fine-tuned: loss, average draft tokens accepted.
HEAD_ONLY = {1: (2.07, 1.52), 3: (1.88, 1.64), 5: (1.80, 1.65)}

# Table 3, seconds of one forward pass: Llama 8B barebone, its head, both; Rocket 3B with its head. 0: without a head.
FORWARD_COLUMNS = ("Llama 8B Barebone", "Llama 8B Head", "Llama 8B Full", "Rocket 3B Full")
FORWARD: dict[int, tuple[float | None, ...]] = {
    0: (0.1761, None, 0.1761, 0.0154),
    1: (0.1761, 0.0132, 0.1893, 0.0160),
    3: (0.1825, 0.0129, 0.1954, 0.0162),
    5: (0.1865, 0.0330, 0.2195, 0.0166),
}
