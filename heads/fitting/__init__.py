# SPDX-License-Identifier: Apache-2.0
"""From a model to heads in given minutes (`ppd fit`): what is chosen, what is kept, and the page at the end."""
