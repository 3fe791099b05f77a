# SPDX-License-Identifier: Apache-2.0
"""The worker group (PPD, Algorithm 2): early drafting over two pipeline stages that work
at once.

scheduler      reserves room for the tokens of a group step
runner         vLLM's worker and model runner V2 as a stage
stage          recognizes a group step: the protocol of both stages, and messages
               between them
first_stage    starts candidates for the next token, while
last_stage     ends the current one
candidates     what each request has emitted in a group step, and KV blocks of its
               candidates
passes         layers outside of vLLM's own forward
"""
