# SPDX-License-Identifier: Apache-2.0
"""What the name of a speculative model stands for: a method of ours, heads (a folder, or on the Hub), or vLLM's own."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import re
from pathlib import Path
from typing import Any

from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.files import read_json_object, reason
from vllm_ppd.heads.hub import cached, folder_of, hub_name, pinned
from vllm_ppd.heads.io import CONFIG_NAME, check_folder
from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.heads.quote import quoted
from vllm_ppd.heads.target_path import check_found, find_target
from vllm_ppd.heads.weights import tensor_names
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.options import LONGEST_NAME, OptionError
from vllm_ppd.vllm_plugins.registry import METHOD_OF_HEADS, METHODS

logger = logging.getLogger("vllm.vllm_ppd")

LONGEST_CONFIG = 16 << 20  # bytes of any model's config.json
ARCHITECTURES = {config.architecture for config in KINDS.values()}
TENSORS = re.compile("|".join(config.tensor_names for config in KINDS.values()))
VLLMS = ("ngram", "[ngram]")  # vLLM's own names of a speculative model that is no model


def is_ours(speculative_config: dict[str, Any]) -> bool:
    """Whether a speculative_config asks for one of our methods.

    Raises:
        OptionError, HeadsError: if its method or model is nothing that anybody could draft with.
    """
    method, model = speculative_config.get("method"), speculative_config.get("model")
    for option, value in (("method", method), ("model", model)):
        if not isinstance(value, str | None):
            raise OptionError(
                f"speculative_config: {option}={quoted(value)} is not a name; give a string, such as 'ppd'"
            )
    if method is not None:
        ours = {*METHODS, *METHOD_OF_HEADS}
        if method not in ours and method not in platform.speculative_methods():
            near = difflib.get_close_matches(method[:LONGEST_NAME].lower(), sorted(ours), n=1)
            if near:
                raise OptionError(f"speculative_config: unknown method {quoted(method)}; did you mean {near[0]!r}?")
        return method in ours
    return isinstance(model, str) and _names_ours(model)


def _names_ours(model: str) -> bool:
    """Whether a speculative model that is given without a method is ours.

    Raises:
        OptionError, HeadsError: as is_ours; vLLM would look such a name up on the Hub and fail with a page of errors.
    """
    if model in METHODS:
        return True
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        if not any(os.path.lexists(os.path.join(path, name)) for name in (CONFIG_NAME, "params.json")):
            raise OptionError(f"speculative model folder {quoted(model)} has no {CONFIG_NAME}; give a heads folder")
        return is_heads_folder(path)
    if os.path.exists(path) and not model.endswith(".gguf"):
        raise OptionError(
            f"speculative model {quoted(model)} is a file; give the heads folder that it lies in, or a method: "
            f"{_methods()}"
        )
    if not model.strip():
        raise OptionError(f"speculative model {quoted(model)} is empty; give a method ({_methods()}) or a heads folder")
    if model.startswith(("./", "../", "/", "~")):
        raise OptionError(
            f"speculative model folder {quoted(model)} does not exist; give a heads folder or a method name"
        )
    dotted = "." in model and all(part.isidentifier() for part in model.split("."))  # a class of the user's own
    if model in VLLMS or dotted or "://" in model or model.endswith(".gguf"):
        return False
    if _is_repository(model):
        return _is_on_hub(model)
    raise OptionError(
        f"speculative model {quoted(model)} is neither a method ({_methods()}) nor a heads folder; for heads or a "
        "draft model of the Hub give ORGANISATION/NAME, or its method, too"
    )


def _is_on_hub(model: str) -> bool:
    """Whether a name on the Hub is that of heads.

    Raises:
        HeadsError: if the Hub does not have it, or cannot be asked.
        OptionError: if a revision is given of what is vLLM's.
    """
    found = hub_name(model)
    if found is None or platform.uses_modelscope():
        return False
    try:
        ours = is_heads_folder(folder_of(model, CONFIG_NAME))
    except MissingFile:
        return False
    if not ours and found.revision is not None:
        raise OptionError(
            f"speculative model {quoted(model)} holds no heads; give the revision of a draft model as revision in "
            "--speculative-config"
        )
    return ours


def is_heads_folder(folder: str) -> bool:
    """Whether a folder of this disk holds heads of ours, as its configuration or the names of its tensors say.

    Raises:
        HeadsError: if its configuration is nothing that anybody could load.
    """
    try:
        data = read_json_object(Path(folder) / CONFIG_NAME, LONGEST_CONFIG, "write it again")
    except MissingFile:
        if _has_our_tensors(folder):
            raise
        return False
    architectures, kind = data.get("architectures"), data.get("speculators_model_type")
    if isinstance(architectures, list) and any(a in ARCHITECTURES for a in architectures if isinstance(a, str)):
        return True
    if kind is None and data.get("speculators_config") is None:
        return _has_our_tensors(folder)
    return not (isinstance(kind, str) and kind in _speculators_of_vllm())


def _has_our_tensors(folder: str) -> bool:
    return any(TENSORS.match(name) for name in tensor_names(folder))


def served_heads(
    model: Any, given: dict[str, Any] | None, revision: str | None = None
) -> tuple[str, dict[str, Any]] | None:
    """What `vllm serve HEADS` means: the target, and the speculative_config; None for what holds no heads.

    Args:
        model: what is to be served.
        given: the user's own speculative_config.
        revision: what --revision has.

    Raises:
        OptionError, HeadsError: if the heads are damaged, if their target is not found, or if another method is given.
    """
    if not isinstance(model, str):
        return None
    if served_from_hub(model):
        if revision is not None:
            raise OptionError(
                f"{quoted(model)} are heads, and --revision is the target's; name theirs as ORGANISATION/NAME@REVISION "
                "and serve TARGET with --speculative-model"
            )
        return _served(pinned(model, CONFIG_NAME), given)
    try:
        os.stat(model)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise OptionError(f"model {quoted(model)} cannot be served: {reason(error)}") from None
        return None
    except ValueError:
        return None
    if not os.path.isdir(model) or not is_heads_folder(model):
        return None
    return _served(model, given)


def served_from_hub(model: str) -> bool:
    """Whether a model to serve is the name of heads on the Hub.

    A name with a revision is: vLLM has none. Of any other the Hub is asked only if its cache does not tell, and nothing
    is said where it does not answer: that is for vLLM to say, which asks next.
    """
    found = hub_name(model)
    if found is None or platform.uses_modelscope():
        return False
    if found.revision is not None:
        return True
    try:
        config = cached(model, CONFIG_NAME) or os.path.join(folder_of(model, CONFIG_NAME), CONFIG_NAME)
        return is_heads_folder(os.path.dirname(config))
    except HeadsError:
        return False


def _served(model: str, given: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    config = check_folder(model)
    asked = {key.replace("-", "_"): value for key, value in (given or {}).items()}
    method = asked.get("method") or config.kind
    ours = METHODS.get(METHOD_OF_HEADS.get(method, method)) if isinstance(method, str) else None
    if ours is None or ours.heads != config.kind:
        raise OptionError(
            f"speculative_config: method={quoted(method)} does not draft with {config.kind} heads, as {quoted(model)} "
            "holds; leave it out"
        )
    if asked.get("model") not in (None, model):
        raise OptionError(
            f"{quoted(model)} are heads, and speculative_config has another model; serve the target, or leave one out"
        )
    folder, another = folder_of(model, CONFIG_NAME), "vllm serve TARGET --speculative-model HEADS"
    target = find_target(config.verifier, folder)
    check_found(target, model, f"name it: {another}")
    logger.info("vllm-ppd: serving %s, the target of the heads in %s; for another: %s", target, model, another)
    return target, {**asked, "method": method, "model": model}


def _speculators_of_vllm() -> set[str]:
    return platform.speculators_algorithms() - set(KINDS)


def _is_repository(model: str) -> bool:
    """Whether it could be ORGANISATION/NAME of a hub of models."""
    organisation, slash, name = model.partition("/")
    return bool(slash and organisation and name) and "/" not in name and len(model) <= 200 and " " not in model


def _methods() -> str:
    return ", ".join(METHODS)
