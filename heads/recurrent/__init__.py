# SPDX-License-Identifier: Apache-2.0
"""Recurrent heads: IBM's MLP speculators, Arctic's MLP and LSTM speculators, and
training in IBM's form.
"""
