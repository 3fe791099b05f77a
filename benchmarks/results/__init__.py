# SPDX-License-Identifier: Apache-2.0
"""The kept results, and the page made of them: sections.py (text, table, plots of a file) -> drawing.py -> page.py."""
