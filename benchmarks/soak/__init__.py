# SPDX-License-Identifier: Apache-2.0
"""Many thousand requests to a real server of each method, next to vLLM alone: `make soak`.

workload.py   what is asked: a pure function of a request's index
client.py     one server: asks, hangs up, samples memory and counters, ends the server, and looks at what is left
checks.py     compares the answers with the control's, and says what is wrong
run.py        who is asked, what is kept, and the report
"""
