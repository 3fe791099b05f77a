# SPDX-License-Identifier: Apache-2.0
"""What DynaMo prints (Tuli et al.): Tables 2, 4, 9 and 10. Figs. 5, 12 and 15 are drawn without numbers."""

from __future__ import annotations

Perplexities = tuple[float | None, ...]  # PPL_1, PPL_2, PPL_3, PPL_1:2, PPL_1:3

# Table 2, without its +- (1.4 to 3.0).
SUITE: dict[str, Perplexities] = {
    "Pythia-70M": (20.2, None, None, None, None),
    "DynaMo-77M-T3": (18.3, 111.4, 262.0, 45.2, 81.2),
    "Pythia-160M": (13.5, None, None, None, None),
    "DynaMo-180M-T3": (12.9, 78.5, 199.4, 31.8, 58.7),
    "Pythia-410M": (9.9, None, None, None, None),
    "DynaMo-430M-T3": (9.6, 59.8, 162.4, 24.0, 45.4),
    "Pythia-1B": (8.5, None, None, None, None),
    "DynaMo-1.1B-T3": (8.4, 44.1, 116.6, 19.3, 35.1),
    "Pythia-1.4B": (7.9, None, None, None, None),
    "DynaMo-1.5B-T3": (7.8, 41.9, 112.7, 18.3, 33.6),
    "Pythia-2.8B": (7.4, None, None, None, None),
    "DynaMo-2.9B-T3": (7.1, 37.1, 100.3, 16.2, 29.8),
    "Pythia-6.9B": (6.6, None, None, None, None),
    "DynaMo-7.3B-T3": (6.5, 31.4, 83.5, 14.4, 25.8),
}

# Table 10, without its +-.
ARCHITECTURES: dict[str, Perplexities] = {
    "Pythia-70M": (20.2, None, None, None, None),
    "Pythia-70M+": (20.1, None, None, None, None),
    "DynaMo-70M-T1-L2": (21.4, 1455.8, None, 189.3, None),
    "DynaMo-70M-T1-L2-M(-1)R": (20.3, 645.3, None, 87.4, None),
    "DynaMo-96M-T2": (19.9, 252.4, None, 68.0, None),
    "DynaMo-74M-T2 (C)": (18.3, 296.4, None, 73.7, None),
    "DynaMo-70M-T2 (LoRA)": (20.2, 1368.1, None, 161.2, None),
    "DynaMo-74M-T2 (CTC)": (18.5, 115.4, None, 46.0, None),
    "DynaMo-99M-T2": (18.3, 111.5, None, 45.2, None),
    "DynaMo-74M-T2 (NP)": (18.8, 131.1, None, 49.0, None),
    "DynaMo-74M-T2-H": (20.2, 119.1, None, 49.0, None),
    "DynaMo-74M-T2": (18.3, 112.4, None, 45.4, None),
    "DynaMo-77M-T2": (18.3, 86.7, None, 39.9, None),
    "DynaMo-77M-T3": (18.3, 111.4, 262.0, 45.2, 81.2),
}

# Table 4: base model's size, FLOPS overhead, speed-up.
BASELINES: dict[str, tuple[str, float, float | str]] = {
    "Speculative Sampling": ("70B", 3.40, "1.92-2.46x"),
    "Skeleton-of-Thought": ("7B-13B", 5.60, "1.13-2.39x"),
    "RecycleGPT": ("1.3B", 0.15, "1.34-1.40x"),
    "DynaMo-77M-T3": ("70M", 0.0895, 3.00),
    "DynaMo-180M-T3": ("160M", 0.0873, 2.19),
    "DynaMo-430M-T3": ("410M", 0.0622, 3.00),
    "DynaMo-1.1B-T3": ("1B", 0.0995, 2.15),
    "DynaMo-1.5B-T3": ("1.4B", 0.0712, 2.07),
    "DynaMo-2.5B-T3": ("2.4B", 0.0567, 2.06),
    "DynaMo-7.3B-T3": ("6.9B", 0.0587, 2.57),
}

# Table 9, DynaMo-7.3B-T3 instruction-finetuned, Vicuna benchmark, eps_b = 0.5, GPT-4 as judge: speed-up, win rate.
ABLATION_EPS_B = 0.5
ABLATION: dict[str, tuple[float, float]] = {
    "CO + AT + G-3": (2.57, 0.98),
    "CO + AT": (2.44, 0.96),
    "CO": (2.61, 0.82),
    "CO-0.5 + AT + G-3": (2.55, 0.77),
    "AT + G-3": (2.49, 0.38),
}

# Fig. 5, from its text: eps_b -> shares of one-, two- and three-token generations.
SHARES: dict[float, tuple[float, float, float]] = {0.0: (0.0, 0.0, 1.0), 1.0: (1.0, 0.0, 0.0)}
