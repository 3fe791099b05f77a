# SPDX-License-Identifier: Apache-2.0
"""Training of heads on transformers, torch and accelerate.

../data -> tokens.py -> target.py (frozen) -> a kind's recipe.py -> loop.py -> a heads
folder
"""
