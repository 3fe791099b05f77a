# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: registration, configuration, worker, model runner, proposers, metrics."""


def register() -> None:
    """Entry point `vllm.general_plugins`: called in every vLLM process, possibly more
    than once.

    Imports nothing heavy, changes nothing unless one of our methods is used, and never
    raises on an unsupported vLLM.
    """
    from vllm_ppd.vllm_plugins import platform
    from vllm_ppd.vllm_plugins.patches.install import install

    platform.end_with_parent()
    install()
