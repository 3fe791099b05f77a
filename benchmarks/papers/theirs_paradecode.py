# SPDX-License-Identifier: Apache-2.0
"""What ParaDecode prints: Tables 1 to 3, and what its text says of Fig. 6, whose points it does not print."""

from __future__ import annotations

TASKS = ("Text Summarization (XSum)", "Code Generation (HumanEval)", "Mathematical Reasoning (GSM8K)")

# Table 1: speed-ups by task.
SPEEDUPS = {
    "SpecDecode, CodeLlama-34B w/ drafter CodeLlama-7B": (1.08, 1.41, 1.26),
    "SpecDecode, CodeLlama-34B w/ drafter CodeLlama-13B": (1.18, 1.23, 1.10),
    "Self-SpecDecode, Llama2-7B": (1.05, 1.09, 1.10),
    "Self-SpecDecode, CodeLlama-13B": (1.03, 1.14, 1.12),
    "Self-SpecDecode, CodeLlama-34B": (1.07, 1.14, 1.14),
    "ParaDecode (Ours), Llama3.1-8B": (1.15, 1.31, 1.42),
    "ParaDecode (Ours), CodeLlama-34B": (1.24, 1.45, 1.53),
}

# Table 2: share of tokens equal to ordinary decoding's, by task.
CONSISTENCY = {
    "SpecDecode, CodeLlama-34B w/ drafter CodeLlama-13B": (0.9498, 0.7856, 0.9391),
    "Self-SpecDecode, Llama2-7B": (0.9426, 0.9483, 0.9414),
    "Self-SpecDecode, CodeLlama-13B": (0.9253, 0.9520, 0.9378),
    "Self-SpecDecode, CodeLlama-34B": (0.9331, 0.9779, 0.9416),
    "ParaDecode (Ours), Llama3.1-8B": (0.9536, 0.9724, 0.9535),
    "ParaDecode (Ours), CodeLlama-34B": (0.9327, 0.9802, 0.9465),
}

# Table 3, HumanEval: consistency ratio, speed-up.
ABLATION = {
    "ParaDecode": (0.9724, 1.312),
    "w/o verification step": (0.2383, 1.605),
    "w/o lightweight LM head training": (0.7128, 0.863),
}

# Fig. 6, HumanEval, Llama3.1-8B: gamma -> speed-up (Table 3 at 0), early prediction rate, verification rejection rate
# (sections 2.2 and 4.2: about 5 % at 0.8, around 30 % at 0).
GAMMAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
THRESHOLD: dict[float, tuple[float | None, float | None, float | None]] = {
    0.0: (1.312, 1.0, 0.30),
    0.8: (None, None, 0.05),
    1.0: (1.0, 0.0, None),
}
