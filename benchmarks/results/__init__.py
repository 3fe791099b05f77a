# SPDX-License-Identifier: Apache-2.0
"""Results as JSON, each with a Markdown file of the same name, and the page that page.py makes from them."""
