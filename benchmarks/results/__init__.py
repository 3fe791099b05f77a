# SPDX-License-Identifier: Apache-2.0
"""Results as JSON, a Markdown file of the same name about each, and the page that page.py makes of them."""
