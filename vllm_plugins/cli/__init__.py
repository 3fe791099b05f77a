# SPDX-License-Identifier: Apache-2.0
"""`ppd`: the command-line tool."""
