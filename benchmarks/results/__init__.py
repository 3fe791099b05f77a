# SPDX-License-Identifier: Apache-2.0
"""Results as JSON, a Markdown file of the same name about each, and the page made of them: sections.py -> page.py."""
