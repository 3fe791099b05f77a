# SPDX-License-Identifier: Apache-2.0
"""Training of heads on transformers and torch alone.

../data -> tokens.py -> target.py (frozen) -> recipes/{early,cp,dynamo}.py -> loop.py -> a heads folder
"""
