# SPDX-License-Identifier: Apache-2.0
"""`ppd`: the command-line tool. Each command is a module with `add(subparsers)` and `run(args)`."""
