# SPDX-License-Identifier: Apache-2.0
"""The papers' tables and figures on a model and data, beside the published values: `ppd bench tables`.

options.py -> run.py (which tables, and their file) -> context.py (model, tasks, texts, heads, engines, made once)
-> ppd.py, paradecode.py, cp.py, dynamo.py (a function a table) -> table.py (rows, claims, Markdown).
published.json holds what the papers print, tables.json titles, columns and notes. acceptance.py is `ppd bench
acceptance`.
"""
